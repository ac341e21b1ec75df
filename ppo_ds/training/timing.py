"""Seconds of each phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.types import Metrics

_LOWER = "; lower memory.{} (it changes memory and speed, not the result)"
REMEDIES = {
    "generate": _LOWER.format("rollout_tokens"),
    "eval": _LOWER.format("rollout_tokens"),
    "switch": "; set actor.zero.generation_gather=layers or actor.zero.offload_states=always",
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values", "reward"), _LOWER.format("score_tokens")),
    **dict.fromkeys(("update_actor", "update_critic"), _LOWER.format("train_tokens")),
}


class PhaseTimer:
    """Adds up seconds under names, and says for heartbeat.py what goes on. A phase within a phase counts as the outer one: no second is counted twice.

    On a GPU they are the device's: events that it passes at a phase's two ends, read once per step, so that the host runs ahead through all
    phases. Work of the host alone counts where the device is idle meanwhile; what it hides behind the work of the phase before is that phase's.
    Not tried on a GPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._phases: list[tuple[str, Any, Any]] = []  # name, and the marks of its two ends
        self._depth = 0
        self._started = time.perf_counter()

    def _mark(self) -> Any:
        """A moment; on a GPU the one at which the device gets to where the host is now. Waits for nothing."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        """Seconds. On a GPU the device must be past both."""
        return start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._mark() if self._depth == 0 else None
        self._depth += 1
        before = heartbeat.enter(f"in the phase {phase!r}")
        try:
            yield
        except torch.OutOfMemoryError as error:
            error.add_note(f"out of memory in the phase {phase!r}{REMEDIES.get(phase, '')}")
            raise
        finally:
            self._depth -= 1
            heartbeat.enter(*before if self._depth else (f"after the phase {phase!r}",))
            if start is not None:
                self._phases.append((phase, start, self._mark()))

    def take(self) -> Metrics:
        """time/<phase> and time/step since the last call, outside all phases; what no phase claims is time/other. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        total, self._started = now - self._started, now
        seconds: dict[str, float] = defaultdict(float)
        for phase, start, end in self._phases:
            seconds[f"time/{phase}"] += self._between(start, end)
        self._phases.clear()
        return seconds | {"time/other": total - sum(seconds.values()), "time/step": total}


def rank_time_spread(world: World, step_seconds: float) -> Metrics:
    """health/rank_time_spread_s: the own seconds of the rank that worked longest less those of the one that worked least; a straggler keeps it high.

    Own seconds are those of the step without the waiting in the collectives of World. What ranks wait for each other inside ZeRO's (its updates,
    all forwards of stage 3) looks like work. A collective.
    """
    own = step_seconds - world.waiting.take()
    most, least = world.max(torch.tensor([own, -own], dtype=torch.float64)).tolist()
    return {"health/rank_time_spread_s": most + least}
