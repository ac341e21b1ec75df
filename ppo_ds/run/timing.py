"""Wall-clock seconds of each phase of a step."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import on_main_rank
from ppo_ds.storage.drafts import draft_directory
from ppo_ds.types import Metrics

_LOWER = "; lower memory.{} (it changes memory and speed, not the result)"
REMEDIES = {  # phase -> advice if the phase runs out of memory; other phases have no advice
    "generate": _LOWER.format("rollout_tokens"),
    "eval": _LOWER.format("rollout_tokens or memory.score_tokens"),
    "switch": "; set actor.zero.generation_gather=layers or actor.zero.offload_states=always",
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "values", "reward"), _LOWER.format("score_tokens")),
    **dict.fromkeys(("update_actor", "update_critic", "update_scorer"), _LOWER.format("train_tokens")),
}


class PhaseTimer:
    """Sums the seconds of named phases and sets the heartbeat's phase. Nested phases count as the outer one.

    On a GPU the seconds are measured between CUDA events, which are read once per step, so that the host can
    run ahead. Time in which the device is idle counts for the host's current phase. Not tested on a GPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._phases: list[tuple[str, Any, Any]] = []  # name, start, end; see _mark
        self._depth = 0
        self._span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # records a phase in a trace
        self._started = time.perf_counter()

    def _mark(self) -> Any:
        """Returns the current time; on a GPU, an event on the current stream. Does not synchronize."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._mark() if self._depth == 0 else None
        span = self._span(f"time/{phase}") if self._depth == 0 else nullcontext()
        self._depth += 1
        before = heartbeat.enter(f"in the phase {phase!r}")
        try:
            with span:
                yield
        except torch.OutOfMemoryError as error:
            error.add_note(f"out of memory in the phase {phase!r}{REMEDIES.get(phase, '')}")
            raise
        finally:
            self._depth -= 1
            heartbeat.enter(*before if self._depth else (f"after the phase {phase!r}",))
            if start is not None:
                self._phases.append((phase, start, self._mark()))

    @contextmanager
    def trace(self, folder: Path, world: World) -> Iterator[None]:
        """Writes a trace of the block on rank 0 by torch.profiler to ``folder``/trace.json.gz.

        All ranks must call this. Each phase is a span with the name of its metric. No trace is written
        if the block raises an exception.
        """
        with torch.profiler.profile() if world.is_main else nullcontext() as profiler:
            self._span = torch.profiler.record_function
            yield
        self._span = nullcontext
        with self("profile"):
            on_main_rank(world, lambda: write_trace(profiler, folder))

    def take(self) -> Metrics:
        """Returns time/<phase>, time/other (outside all phases) and time/step since the last call.

        Synchronizes the device. Must not be called inside a phase.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        total, self._started = now - self._started, now
        seconds: dict[str, float] = defaultdict(float)
        for phase, start, end in self._phases:
            seconds[f"time/{phase}"] += start.elapsed_time(end) / 1000 if on_gpu else end - start
        self._phases.clear()
        return seconds | {"time/other": total - sum(seconds.values()), "time/step": total}


def write_trace(profiler: Any, folder: Path) -> None:
    with draft_directory(folder) as draft:
        profiler.export_chrome_trace(str(draft / "trace.json.gz"))


def compare_times(world: World, step_seconds: float) -> tuple[Metrics, float]:
    """Returns health/rank_time_spread_s, and the clock of rank 0 in seconds. All ranks must call this.

    The spread is the longest busy time of a rank minus the shortest. The busy time is that of the step
    without waits in collectives of World; waits in ZeRO's collectives count as busy.
    """
    busy = step_seconds - world.waiting.take()
    clock = time.monotonic() if world.is_main else -math.inf
    most, least, now = world.max(torch.tensor([busy, -busy, clock], dtype=torch.float64)).tolist()
    return {"health/rank_time_spread_s": most + least}, now
