"""Runs the static backend with CUDA graphs. Its recorder marks what happens inside a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ppo_ds.rollout import static
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.parts import Case, language_model
from tests.gpu_sim.fake_cuda import FakeCuda

PROMPT, LIMIT = 10, 128
STOP = 2


class Recorder:
    """Stands in for CudaRecorder. A replay runs nothing, since the device computes nothing."""

    def __init__(self, device: FakeCuda):
        self._device = device
        self.steps = self.warm_ups = self.captures = self.replays = 0
        self.kernels = 0  # of the last captured step

    def warm_up(self, step: Callable[[], None]) -> None:
        self.warm_ups += 1
        self.steps += 1
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        self._device.capturing = True
        before = self._device.report.kernels.total()
        try:
            step()
        finally:
            self._device.capturing = False
        self.kernels = self._device.report.kernels.total() - before
        return self.replay

    def replay(self) -> None:
        self.replays += 1
        self.steps += 1


class Tokenizer:
    """Decodes ids as numbers."""

    pad_id = 0

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


@contextmanager
def graphs_recorded(device: FakeCuda, limit: int) -> Iterator[Recorder]:
    """Records graphs with a Recorder inside the block, in which every response has ``limit`` tokens.

    The flags that the host reads are computed from the number of steps, since the responses in progress
    started together.
    """
    recorder = Recorder(device)

    def unfinished(source: Tensor) -> Tensor:
        flag = source.dtype == torch.bool and recorder.steps % limit != 0
        return torch.full(source.shape, flag, dtype=source.dtype)

    device.answer = unfinished
    with mock.patch.object(static, "recorder_for", lambda device: recorder):
        yield recorder


def static_generator(lm: nn.Module, tokenizer: Any, slots: int, longest: int) -> static.StaticGenerator:
    """Makes a generator with ``slots`` slots for sequences of at most ``longest`` tokens."""
    return static.StaticGenerator(lambda: lm, tokenizer=tokenizer, token_budget=slots * longest)


def decode(
    device: FakeCuda,
    family: str = "qwen2",
    rows: int = 4,
    slots: int = 4,
    limit: int = LIMIT,
    stop_strings: tuple[str, ...] = (),
) -> None:
    """Decodes ``limit`` tokens for each of ``rows`` prompts in waves of ``slots`` responses."""
    lm = language_model(family).eval()
    prompts = Prompts(
        ids=torch.randint(5, 500, (rows, PROMPT)),
        mask=torch.ones(rows, PROMPT, dtype=torch.bool),
        limits=torch.full((rows,), limit),
        metadata=({},) * rows,
    )
    sampling = SamplingParams(limit, 4, 0.8, 0.95, 40, (STOP,), stop_strings)
    generator = static_generator(lm, Tokenizer(), slots, PROMPT + limit)
    device.report.clear()
    with graphs_recorded(device, limit) as recorder:
        rollout = generator(prompts, sampling)
    assert rollout.response_lengths.tolist() == [limit] * rows
    device.report.facts |= {
        "steps": recorder.steps,
        "warm_ups": recorder.warm_ups,
        "captures": recorder.captures,
        "replays": recorder.replays,
        "kernels": recorder.kernels,
    }


def case(name: str) -> Case:
    if name == "stop strings":
        return partial(decode, stop_strings=("7 7 7",))
    return partial(decode, rows=6) if name == "two waves" else partial(decode, family=name)


CASES = {name: case(name) for name in NAMES["decoding"]}
