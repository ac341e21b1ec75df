"""Who hears of a run: the protocol, and the fan-out that rank 0 holds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ppo_ds.types import Metrics

Record = dict[str, float | None]  # metrics ready to be written: None where a number was not finite


class Tracker(Protocol):
    """Where numbers and samples go. Methods are called on rank 0 only, in the order start, log and samples, finish."""

    def start(self, config: dict[str, Any]) -> None:
        """The run begins; ``config`` is the whole resolved one."""

    def log(self, step: int, metrics: Record) -> None:
        """The numbers of one step."""

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Some answers of one step: prompt, response, score, kl, length, finish. ``split`` is train or eval."""

    def rewind(self, step: int) -> None:
        """The run has gone back to where ``step`` was done: what was said of later ones is no longer so."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run ends; ``summary`` says why (``exit_reason``) and what came of it."""


class Trackers:
    """Every tracker of the run as one. Ranks other than 0 hold an empty one."""

    def __init__(self, trackers: Sequence[Tracker] = (), *, max_samples: int = 8, elapsed: float = 0.0):
        """``max_samples`` rows are kept per step (-1: all); ``elapsed`` seconds were spent before this process (resume)."""
        self._trackers = tuple(trackers)
        self._max_samples = max_samples
        self._started = time.monotonic() - elapsed

    def start(self, config: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.start(config)

    def log(self, step: int, metrics: Metrics) -> None:
        """Adds ``time`` (seconds since the start of the run) and ``health/nonfinite``, so that all trackers say the same."""
        record = finite(metrics)
        lost = sum(value is None for value in record.values())
        record["health/nonfinite"] = (record.get("health/nonfinite") or 0.0) + lost
        record["time"] = self._seconds()
        for tracker in self._trackers:
            tracker.log(step, record)

    def samples(self, step: int, rows: Sequence[dict[str, Any]], split: str = "train") -> None:
        kept = [finite(row) for row in (rows if self._max_samples < 0 else rows[: self._max_samples])]
        for tracker in self._trackers if kept else ():
            tracker.samples(step, kept, split)

    def rewind(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.rewind(step)

    def finish(self, summary: dict[str, Any]) -> None:
        """``summary`` needs ``exit_reason``; ``wall_s`` (seconds, earlier parts of a resumed run included) is added."""
        summary = finite({**summary, "wall_s": self._seconds()})
        for tracker in self._trackers:
            tracker.finish(summary)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._started, 3)


def finite(values: Any) -> Any:
    """The same dict (or list, or number) with None for every float that JSON has no word for."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
