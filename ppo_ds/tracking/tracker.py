"""Defines the base class of trackers, and a class that forwards to all trackers of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Literal

from ppo_ds.secrets import censored, censored_tree
from ppo_ds.types import Histogram, Metrics

Record = dict[str, float | None]  # metrics as written: None for values that were not finite
EventKind = Literal["started", "resumed", "evaluated", "rolled_back", "warning", "alarm", "ended"]


class Tracker:
    """A destination of metrics, samples and events. Methods that are not overridden do nothing.

    Methods are called only on rank 0: ``start`` first, ``finish`` last.
    """

    def start(self, config: dict[str, Any]) -> None:
        """Begins the run; ``config`` is the complete resolved config."""

    def log(self, step: int, metrics: Record) -> None:
        """Records the metrics of one step."""

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Records sample rows of one step; ``split`` is train, eval or train_prompts.

        A row has the keys prompt, asked (the last message of the prompt), response, score and prompt_id. Rows
        of PPO also have length and finish, and components if the score has parts. In training steps they have
        kl and, with tracker.sample_tokens, tokens: columns with one entry per token (ppo/sample_rows.py).
        """

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Records one line about an event after ``step`` steps; warnings and alarms are printed too."""

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        """Records histograms of one step, by metric name."""

    def rewind(self, step: int) -> None:
        """Discards the records of steps after ``step`` when the run is rolled back to ``step``."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Ends the run; ``summary`` holds the ``exit_reason`` and final results."""


class Trackers:
    """Forwards to all trackers of the run; ranks other than 0 hold no tracker."""

    def __init__(self, trackers: Sequence[Tracker] = (), *, max_samples: int = 8, elapsed: float = 0.0):
        """Keeps ``max_samples`` rows per step (-1: all); the run took ``elapsed`` seconds before a resume."""
        self._trackers = tuple(trackers)
        self._max_samples = max_samples
        self._started = time.monotonic() - elapsed

    def start(self, config: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.start(config)

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs the metrics of a step, adding ``health/nonfinite`` and ``time``, the duration of the run."""
        record = finite(metrics)
        nonfinite = sum(value is None for value in record.values())
        record["health/nonfinite"] = (record.get("health/nonfinite") or 0.0) + nonfinite
        record["time"] = self._seconds()
        for tracker in self._trackers:
            tracker.log(step, record)

    def samples(self, step: int, rows: Sequence[dict[str, Any]], split: str = "train") -> None:
        kept = rows if self._max_samples < 0 else rows[: self._max_samples]
        kept = [censored_row(finite(row)) for row in kept]
        for tracker in self._trackers if kept else ():
            tracker.samples(step, kept, split)

    def event(self, step: int, kind: EventKind, text: str) -> None:
        line = " ".join(censored(text).split())
        for tracker in self._trackers:
            tracker.event(step, kind, line)

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        for tracker in self._trackers:
            tracker.histograms(step, histograms)

    def rewind(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.rewind(step)

    def finish(self, summary: dict[str, Any]) -> None:
        """Ends the run; adds ``wall_s``, in seconds, to ``summary``, and removes secrets for all trackers."""
        summary = censored_tree(finite({**summary, "wall_s": self._seconds()}))
        for tracker in self._trackers:
            tracker.finish(summary)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._started, 3)


def censored_row(row: dict[str, Any]) -> dict[str, Any]:
    """Removes secrets from a row, and all tokens of a response with a secret, since they would spell it."""
    clean = censored_tree(row)
    if clean.get("response") != row.get("response"):
        clean.pop("tokens", None)
    return clean


def finite(values: Any) -> Any:
    """Returns a copy of a dict, list or number with None in place of floats that JSON cannot represent."""
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
