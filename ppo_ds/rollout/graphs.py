"""CUDA graphs of a decode step: what the host would launch kernel by kernel for each token is launched at once.

A graph replays the same kernels on the same addresses, so a step must read and write tensors that stay where they are (the KV cache and the
state of the slots), must not wait for the device, and has one graph for each shape. Graphs live as long as one rollout: the cache is freed
after it, and with ZeRO-3 the weights move too. Recording a shape costs about as much as two plain steps, against up to some sixty replays.

Not tried on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

log = logging.getLogger(__name__)


class Recorder(Protocol):
    """What makes a graph: CUDA, or a stand-in."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs the step once, where it will be recorded."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, not run, as something that runs it. RuntimeError where it cannot be recorded."""
        ...


class CudaRecorder:
    """All graphs share one memory pool: they run one after the other and leave nothing in it that another one needs."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """On the stream of the recording: libraries set up their work space there, which must not happen while it records."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # thread_local: what other threads (NCCL's watchdog) ask of the device meanwhile spoils nothing
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                step()
        finally:
            torch.cuda.set_stream(stream)  # torch (2.13) stays on the recording's where a recording fails
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """None where there is nothing to record for."""
    return CudaRecorder() if device.type == "cuda" else None


class Graphs:
    """Runs steps: the first of each shape plainly, from the second on as a graph. Plain steps only, after a warning, where that fails."""

    def __init__(self, recorder: Recorder | None):
        """None: plain steps."""
        self.recorder = recorder
        self.failure: str | None = None
        self._graphs: dict[Hashable, Callable[[], None]] = {}
        self._warm: set[Hashable] = set()

    def run(self, shape: Hashable, step: Callable[[], None]) -> None:
        """One step; steps of the same ``shape`` differ in the contents of tensors alone."""
        if self.recorder is None:
            step()
        elif shape in self._graphs:
            self._graphs[shape]()
        elif shape not in self._warm:
            self._warm.add(shape)
            self.recorder.warm_up(step)
        else:
            self._record(self.recorder, shape, step)

    def _record(self, recorder: Recorder, shape: Hashable, step: Callable[[], None]) -> None:
        try:
            self._graphs[shape] = recorder.record(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # recording runs nothing, so the step is still to be taken. Seen with models that look at numbers on the host (some mixtures of experts)
            self.failure = str(error).splitlines()[0]
            log.warning("decoding goes on without CUDA graphs, slower: %s", self.failure)
            self.recorder = None
            self._graphs.clear()
            step()
        else:
            self._graphs[shape]()
