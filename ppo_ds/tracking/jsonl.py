"""Writes the record of a run: ``metrics.jsonl``, ``events.jsonl``, ``samples/`` and ``summary.json``."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_ds.storage.drafts import open_for_appending, write_file
from ppo_ds.storage.reading import MAX_DEPTH, MAX_LINES_BYTES, is_plain, read_text
from ppo_ds.tracking.tracker import EventKind, Record, Tracker

Curve = tuple[list[int], list[float]]  # steps, values
LARGEST = 1e100  # larger values are left out, since their sums would not be finite


class JsonlTracker(Tracker):
    """Writes and flushes one line with a JSON object for each step, so that a kill loses no finished step.

    A resume or a rollback never removes events; a run that starts at step 0 begins a new events.jsonl.
    """

    def __init__(self, run_dir: str | os.PathLike, *, resumed_at: int = 0):
        """Opens the files and removes records of steps after ``resumed_at``, the checkpoint's step."""
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "metrics.jsonl"
        self._samples_dir = self.run_dir / "samples"
        self._samples_dir.mkdir(parents=True, exist_ok=True)
        self._truncate_after(resumed_at)
        self._started = time.monotonic() - self.elapsed
        self._events_path = self.run_dir / "events.jsonl"
        events = read_events(self._events_path) if resumed_at > 0 else []
        write_file(self._events_path, "".join(_line(event) for event in events))  # without a partial line

    def _truncate_after(self, step: int) -> None:
        """Removes incomplete lines and records of steps after ``step``, and opens the file for appending."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step] if step > 0 else []
        write_file(self.path, "".join(_line(record) for record in kept))
        for file in self._samples_dir.glob("*step_*.jsonl"):
            number = re.search(r"step_(\d+)", file.name)
            if number and int(number[1]) > step:
                file.unlink()
        self._last: dict[str, Any] = kept[-1] if kept else {"step": step}
        self._file = open_for_appending(self.path)

    @property
    def elapsed(self) -> float:
        """The duration of the run in seconds up to the last recorded step."""
        return float(self._last.get("time") or 0.0)

    def log(self, step: int, metrics: Record) -> None:
        """Appends the line of a step; if the last line has the same step, replaces it."""
        replaces_last, self._last = step == self._last["step"], {"step": step, **metrics}
        if replaces_last:
            kept = [record for record in read_metrics(self.path) if record["step"] < step]
            self._file.close()
            write_file(self.path, "".join(_line(record) for record in kept))
            self._file = open_for_appending(self.path)
        self._file.write(_line(self._last))
        self._file.flush()

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        prefix = "" if split == "train" else f"{split}_"
        file = self._samples_dir / f"{prefix}step_{step:06d}.jsonl"
        write_file(file, "".join(_line(row) for row in rows))

    def event(self, step: int, kind: EventKind, text: str) -> None:
        seconds = round(time.monotonic() - self._started, 3)
        with open_for_appending(self._events_path) as file:
            file.write(_line({"step": step, "time": seconds, "kind": kind, "text": text}))

    def rewind(self, step: int) -> None:
        self._file.close()
        self._truncate_after(step)

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes ``summary.json``: ``summary``, the number of steps and the metrics of the last step."""
        last = {key: value for key, value in self._last.items() if key not in ("step", "time")}
        content = {**summary, "steps": self._last["step"], **last}
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        write_file(self.run_dir / "summary.json", text + "\n")
        self._file.close()


def read_rows(path: str | os.PathLike, root: Path | None = None) -> list[dict[str, Any]]:
    """Reads the objects of a JSON Lines file. Skips damaged or deeply nested lines. [] without a file."""
    try:
        lines = read_text(Path(path), root, MAX_LINES_BYTES).split("\n")
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):  # cut off, or with a number of thousands of digits
            row = json.loads(line, parse_constant=int) if line else None  # int refuses NaN and Infinity
            # is_plain is slow, so it checks only rows with as many brackets as too deep rows have
            if isinstance(row, dict) and (line.count("[") + line.count("{") < MAX_DEPTH or is_plain(row)):
                rows.append(row)
    return rows


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the steps of a ``metrics.jsonl`` in order, keeping only values that are numbers or None."""
    return [{k: v for k, v in record.items() if v is None or is_number(v)} for record in _steps(path)]


def read_events(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the events of an ``events.jsonl`` in order, without a line that was cut off."""
    texts = ("kind", "text")
    events = [event for event in _steps(path) if all(isinstance(event.get(key), str) for key in texts)]
    return [event for event in events if is_number(event.get("time"))]


def _steps(path: str | os.PathLike) -> list[dict[str, Any]]:
    return [row for row in read_rows(path) if type(row.get("step")) is int and 0 <= row["step"] < 2**53]


def read_curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Returns the steps and the values of every metric in ``records``."""
    curves: dict[str, Curve] = {}
    for record in records:
        for name, value in record.items():
            if is_number(value):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    return curves


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, default=str) + "\n"
