"""CUDA graphs of a decode step: all kernels of a token are launched at once instead of one by one.

A graph replays the same kernels on the same addresses, so a step must read and write tensors with fixed
addresses (the KV cache and the state of the slots), must not wait for the device, and needs one graph per
shape. Graphs are kept for one rollout, since afterwards the cache is freed and with ZeRO-3 the weights move
too. Recording a shape costs about as much as two plain steps, and the graph replaces up to about sixty.

This module has not been tested on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Interface for recording graphs: ``CudaRecorder``, or a substitute in tests."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs the step once on the stream that is used for recording."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records the step without running it; returns its replay. Raises RuntimeError if recording fails."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, since only one of them runs at a time."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs the step once on the stream that is used for recording.

        Libraries set up their workspaces in this run, before anything is recorded.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records the step without running it and returns its replay."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # thread_local: concurrent calls of other threads (NCCL's watchdog) do not invalidate the
            # recording
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                step()
        finally:
            torch.cuda.set_stream(stream)  # torch 2.13 stays on the recording stream if recording fails
        return graph.replay


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns a recorder for a GPU, or None for any other device."""
    return CudaRecorder() if device.type == "cuda" else None


class Graphs:
    """Runs the first step of each shape without a graph, records the second step and replays it thereafter.

    If a recording fails, a warning is logged and all later steps run without graphs.
    """

    def __init__(self, recorder: Recorder | None):
        """Uses no graphs if ``recorder`` is None."""
        self.recorder = recorder
        self.failure: str | None = None
        self._graphs: dict[Hashable, Callable[[], None]] = {}
        self._warm: set[Hashable] = set()

    def run(self, shape: Hashable, step: Callable[[], None]) -> None:
        """Runs one step; steps of the same ``shape`` differ only in the contents of tensors."""
        if self.recorder is None:
            step()
        elif shape in self._graphs:
            self._graphs[shape]()
        elif shape not in self._warm:
            self._warm.add(shape)
            self.recorder.warm_up(step)
        else:
            self.record(self.recorder, shape, step)

    def record(self, recorder: Recorder, shape: Hashable, step: Callable[[], None]) -> None:
        """Records a step of a new shape and runs it."""
        try:
            self._graphs[shape] = recorder.record(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # Models that read numbers on the host (some mixtures of experts) cannot be recorded. The step is
            # run here, because recording does not run it.
            self.failure = str(error).splitlines()[0]
            log.warning("decoding continues without CUDA graphs, slower: %s", self.failure)
            self.recorder = None
            self._graphs.clear()
            step()
        else:
            self._graphs[shape]()
