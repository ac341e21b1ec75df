"""Seconds of each phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ppo_ds.types import Metrics

_LOWER = "; lower memory.{} (it changes memory and speed, not the result)"
REMEDIES = {
    "generate": _LOWER.format("rollout_tokens"),
    "eval": _LOWER.format("rollout_tokens"),
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values", "reward"), _LOWER.format("score_tokens")),
    **dict.fromkeys(("update_actor", "update_critic"), _LOWER.format("train_tokens")),
}


class PhaseTimer:
    """Adds up wall-clock seconds under names; on a GPU the device is waited for at a phase's two ends, and only there.

    A phase within a phase counts as the outer one: no second is counted twice.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._depth = 0
        self._started = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        self._depth += 1
        try:
            yield
        except torch.OutOfMemoryError as error:
            error.add_note(f"out of memory in the phase {phase!r}{REMEDIES.get(phase, '')}")
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds[phase] += self._now() - start

    def take(self) -> Metrics:
        """time/<phase> and time/step since the last call; what no phase claims is time/other."""
        now = self._now()
        total, self._started = now - self._started, now
        phases = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds.clear()
        return phases | {"time/other": total - sum(phases.values()), "time/step": total}
