"""Tests the recording of CUDA graphs and what follows a failure, with a stand-in for torch.cuda."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.errors import RunError
from ppo_ds.rollout import graphs
from ppo_ds.rollout.graphs import KEPT_GRAPHS, CudaRecorder, Graphs

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")
NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing\nmore")


class Cuda:
    """Stands in for torch.cuda. A replay runs the recorded step.

    ``errors`` are the errors of the recordings in order, None for one that succeeds. An error of the step
    makes the end of its capture fail too, if ``invalid``.
    """

    def __init__(self, monkeypatch, errors=(), invalid=True):
        self.errors, self.invalid, self.log = list(errors), invalid, []
        self.recording = self.end_error = None
        calls = {
            "CUDAGraph": lambda: SimpleNamespace(
                capture_begin=self.begin, capture_end=self.end, replay=self.replay
            ),
            "Stream": lambda device: SimpleNamespace(wait_stream=lambda other: None),
            "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": lambda: self.log.append("new pool") or (0, self.log.count("new pool")),
            "empty_cache": lambda: self.log.append("cache emptied"),
        }
        for name, call in calls.items():
            monkeypatch.setattr(torch.cuda, name, call)
        graphs.capture_stream.cache_clear()
        monkeypatch.setattr(graphs, "FAILURES_ARE_HARMLESS", True)

    def begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.log.append(f"records into pool {pool[1]}")
        self.recording = self.errors.pop(0) if self.errors else None

    def step(self):
        if self.recording is not None:
            raise self.recording
        self.log.append("step")

    def end(self):
        failed, self.recording = self.recording, None
        if failed is not None and self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        if self.end_error is not None:
            raise self.end_error
        self.log.append("ends")

    def replay(self):
        self.log.append("replay")


@pytest.fixture
def cuda(monkeypatch):
    yield lambda *errors, **how: Cuda(monkeypatch, errors, **how)
    graphs.capture_stream.cache_clear()


def run(device, times=2):
    """Runs the steps of one shape; the second is recorded."""
    kept = Graphs(CudaRecorder("cuda"))
    for _ in range(times):
        kept.run("shape", device.step)
    return kept


def test_each_set_of_graphs_has_its_own_pool_whose_memory_is_freed(cuda):
    device = cuda()
    for number in (1, 2):
        device.log = ["new pool"] * (number - 1)
        kept = run(device, times=3)
        kept.close()
        recorded = [f"records into pool {number}", "step", "ends", "replay", "replay", "cache emptied"]
        assert device.log == ["new pool"] * number + ["step", *recorded] and not kept._graphs


def test_a_recording_without_memory_is_repeated_in_a_new_pool(cuda):
    device = cuda(NO_MEMORY)
    run(device)
    again = ["new pool", "records into pool 2", "step", "ends", "replay"]
    assert device.log == ["new pool", "step", "records into pool 1", "cache emptied", *again]
    with pytest.raises(torch.OutOfMemoryError):  # of the phase, which is then repeated with a smaller budget
        run(cuda(NO_MEMORY, NO_MEMORY))


@pytest.mark.parametrize("invalid", [True, False])
def test_after_a_failed_recording_decoding_goes_on_without_graphs_after_one_warning(cuda, caplog, invalid):
    device = cuda(NOT_PERMITTED, invalid=invalid)
    kept = run(device, times=3)
    assert kept.failure == "operation not permitted when stream is capturing"
    (line,) = caplog.messages
    assert line == f"decoding continues without CUDA graphs, slower: {kept.failure}"
    ended = [] if invalid else ["ends"]
    assert device.log == ["new pool", "step", "records into pool 1", *ended, "step", "step"]


def test_a_graph_that_cannot_be_instantiated_is_a_failed_recording(cuda):
    device = cuda()
    device.end_error = RuntimeError("CUDA error: out of memory")
    assert run(device, times=3).failure == "CUDA error: out of memory"
    assert device.log[-2:] == ["step", "step"]


def test_an_error_of_another_class_is_raised(cuda):
    with pytest.raises(KeyError):
        run(cuda(KeyError("an error of the model's code")))


@pytest.mark.parametrize(
    ("error", "reason"), [(NOT_PERMITTED, "operation not permitted.*"), (NO_MEMORY, "CUDA out of memory.")]
)
def test_with_an_older_torch_a_failed_recording_ends_the_run(cuda, monkeypatch, error, reason):
    """It cannot free GPU memory after a capture that has not ended."""
    device = cuda(error)
    monkeypatch.setattr(graphs, "FAILURES_ARE_HARMLESS", False)
    line = f"^rollout.backend=static: .* CUDA graph \\({reason}\\), .* torch 2.13 .*rollout_tokens$"
    with pytest.raises(RunError, match=line):
        run(device)


def test_the_least_recently_used_graph_is_dropped_and_recorded_again_without_a_warm_up(cuda):
    device = cuda()
    kept = Graphs(CudaRecorder("cuda"))
    for shape in [shape for shape in range(KEPT_GRAPHS) for _ in range(2)] + [0, KEPT_GRAPHS, KEPT_GRAPHS]:
        kept.run(shape, device.step)
    for shape, calls in ((0, ["replay"]), (1, ["records into pool 1", "step", "ends", "replay"])):
        device.log.clear()
        kept.run(shape, device.step)
        assert device.log == calls
