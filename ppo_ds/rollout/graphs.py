"""CUDA graphs of a decode step: all kernels of a token are launched at once instead of one by one.

A graph replays the same kernels on the same addresses, so a step must read and write tensors with fixed
addresses (the KV cache and the state of the slots), must not wait for the device, and needs one graph per
shape. Graphs are kept for one rollout, since afterwards the cache is freed and with ZeRO-3 the weights get
other addresses. Recording a shape costs about as much as two plain steps.

Memory pools. The graphs of a rollout share a private pool of torch's caching allocator: only one graph runs
at a time, and no result of a step is in the pool. The allocator counts the graphs of a pool and fails to
record into a pool whose last graph was deleted (``create_or_incref_pool`` in
c10/cuda/CUDACachingAllocator.cpp asserts use_count > 0). Each set of graphs therefore has a new pool, and
keeps at least one graph during later recordings.

Failed recordings. In torch 2.11 and 2.12, ``CUDAGraph.capture_end`` raises the error of an invalidated
capture before it tells the allocator that the capture is over. The next ``empty_cache`` then fails with an
internal assertion (pytorch pull request 180395). With these versions, the run ends with an error. From torch
2.13 on, decoding continues without graphs; before pull request 190348, memory of the failed recording is not
reused.

This module has been tested only with simulated CUDA graphs (tests/rollout, tests/gpu_sim), not on a GPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable

import torch

from ppo_ds.errors import RunError

log = logging.getLogger(__name__)

# Number of graphs that are kept; the least recently used one is dropped. Columns grow during a rollout, so
# the graphs of smaller shapes are dropped. At least two are needed: a pool must not lose its last graph
# before the next recording, and the graph that was launched last must not be dropped.
KEPT_GRAPHS = 4
# False if a failed capture leaves the allocator unusable
FAILURES_ARE_HARMLESS = torch.__version__ >= (2, 13)


class CudaRecorder:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device):
        self.stream = capture_stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs the step once on the stream that is used for recording, without the pool.

        Libraries allocate their workspaces in this run. A workspace that is allocated during a recording
        would stay in the pool and keep the pool's memory from being freed. During the warm-up of another
        shape, there are two sets of logits, one in the pool; ``static_decode_bytes`` counts both.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.current_stream().wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records the step without running it; returns a function that replays it.

        Raises RuntimeError if the recording fails, and the subclass RunError if the run cannot continue. The
        allocator cannot free cached blocks during a recording. If memory runs out, these blocks are freed and
        the step is recorded again, in a new pool because the old pool may have lost its only graph.
        """
        try:
            return self.capture(step)
        except torch.OutOfMemoryError:
            pass  # outside of this block the traceback no longer holds the tensors of the failed recording
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()
        return self.capture(step)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Captures one graph, without the synchronisation and ``empty_cache`` of ``torch.cuda.graph``.

        Neither is needed, because nothing runs during a capture and the current stream orders the replays.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # thread_local: concurrent calls of other threads (NCCL's watchdog) do not invalidate the capture
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                step()
            except Exception:
                end_capture(graph, failed=True)
                raise
            end_capture(graph)
        return graph.replay


def end_capture(graph: torch.cuda.CUDAGraph, failed: bool = False) -> None:
    """Ends a capture. If the step has ``failed``, ignores errors, because the caller raises the step's error.

    Raises RunError if the capture does not end and this version of torch cannot continue after that. A phase
    that ran out of memory then cannot be repeated with a smaller budget, since its memory is not freed.
    """
    try:
        graph.capture_end()
    except RuntimeError as error:
        if not FAILURES_ARE_HARMLESS:
            reason = str(error.__context__ or error).partition("\n")[0]  # of the step, if it has failed
            raise RunError(
                f"rollout.backend=static: a decode step cannot be recorded as a CUDA graph ({reason}), and "
                f"torch {torch.__version__} cannot free GPU memory after a failed recording; install torch "
                "2.13 or later, set rollout.backend=hf, or, if memory ran out, a lower memory.rollout_tokens"
            ) from error
        if not failed:
            raise


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which CUDA graphs are recorded, always the same one for a ``device``.

    Libraries such as cuBLAS allocate a workspace for each stream.
    """
    return torch.cuda.Stream(device)


def recorder_for(device: torch.device) -> CudaRecorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None


class Graphs:
    """Runs the first step of each shape without a graph, records the second step and replays it thereafter.

    If a recording fails, a warning is logged and all later steps run without graphs.
    """

    def __init__(self, recorder: CudaRecorder | None):
        """Uses no graphs if ``recorder`` is None."""
        self.recorder = recorder
        self.failure: str | None = None
        self._graphs: dict[Hashable, Callable[[], None]] = {}  # the most recently used one is the last
        self._warm: set[Hashable] = set()

    def run(self, shape: Hashable, step: Callable[[], None]) -> None:
        """Runs one step; steps of the same ``shape`` must differ only in the contents of tensors."""
        if self.recorder is None:
            step()
        elif shape in self._graphs:
            self._graphs[shape] = replay = self._graphs.pop(shape)
            replay()
        elif shape not in self._warm:
            self._warm.add(shape)
            self.recorder.warm_up(step)
        else:
            self.record(self.recorder, shape, step)

    def record(self, recorder: CudaRecorder, shape: Hashable, step: Callable[[], None]) -> None:
        """Records a step of a new shape and runs it."""
        try:
            replay = recorder.record(step)
        except (torch.OutOfMemoryError, RunError):
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
            self._graphs[shape] = replay
            if len(self._graphs) > KEPT_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            replay()

    def close(self) -> None:
        """Drops the graphs and frees their pool, which no other tensors can use. The device must be idle."""
        self._graphs.clear()
        if self._warm:
            torch.cuda.empty_cache()
