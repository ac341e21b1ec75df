"""Live view of a run on a terminal: progress, current phase, latest metrics with their trend, alarms."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Protocol

from rich.cells import cell_len
from rich.text import Text

from ppo_ds.tracking.catalogue import LIVE_VIEW, find, outside
from ppo_ds.tracking.formatting import format_duration, format_number
from ppo_ds.tracking.tracker import Record

KEPT = 12  # values of a metric in its trend, and steps in the estimate of the time that is left
ALARM_STEPS = 20  # number of steps for which an alarm is shown
METRIC_LINES = 3
SPARKS = "▁▂▃▄▅▆▇█"


class Work(Protocol):
    """Countable work of a phase."""

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def unit(self) -> str: ...


class Activity(Protocol):
    """State of the heartbeat of this process (distributed/heartbeat.py)."""

    @property
    def phase(self) -> str: ...

    @property
    def since(self) -> float: ...

    @property
    def work(self) -> Sequence[Work]: ...


class LiveView:
    """Renders the lines below the log of a run. Only reads numbers of the host."""

    def __init__(
        self,
        stage: str,
        total: int,
        activity: Callable[[], Activity],
        *,
        step: int = 0,
        unicode: bool = True,
        clock: Callable[[], float] = time.time,
    ):
        """Initializes the view of a run of ``total`` steps, of which ``step`` are done.

        ``unicode`` is False for a terminal that can show ASCII only. ``clock`` is the clock of
        ``Activity.since``.
        """
        self._stage, self._total, self._step = stage, total, step
        self._activity, self._unicode, self._clock = activity, unicode, clock
        self._started = self._logged = clock()
        self._durations: deque[float] = deque(maxlen=KEPT)  # seconds from one record to the next
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._alarm: tuple[int, str] | None = None

    def log(self, step: int, metrics: Record) -> None:
        now = self._clock()
        self._durations.append(now - self._logged)
        self._step, self._logged = step, now
        for shown in LIVE_VIEW:
            if (value := metrics.get(shown.metric)) is not None:
                self._history[shown.metric].append(value)

    def alarm(self, step: int, text: str) -> None:
        self._alarm = (step, text)

    def rewind(self, step: int) -> None:
        self._step, self._logged = step, self._clock()
        self._history.clear()

    def render(self, columns: int) -> list[Text]:
        """Returns the lines for a terminal with ``columns`` columns."""
        lines = [self.run_line(columns), self.phase_line(columns), *self.metric_lines(columns)]
        if self._alarm is not None and self._step - self._alarm[0] < ALARM_STEPS:
            lines.append(Text(f"alarm at step {self._alarm[0]}: {self._alarm[1]}", style="bold yellow"))
        for line in lines:
            line.truncate(columns, overflow="ellipsis" if self._unicode else "crop")
        return lines

    def seconds_left(self) -> float | None:
        """Estimates the seconds to the last step from the last steps; None before the first of them."""
        if not self._durations:
            return None
        each, steps = fmean(self._durations), self._total - self._step
        return max(each * steps - (self._clock() - self._logged), each * (steps - 1), 0.0)

    def run_line(self, columns: int) -> Text:
        left = self.seconds_left()
        times = f"{format_duration(self._clock() - self._started, whole=True)}, "
        times += "time left not known yet" if left is None else f"{format_duration(left, whole=True)} left"
        start, end = f"{self._stage} ", f" step {self._step}/{self._total}  {times}"
        bar = self.bar(self._step / max(self._total, 1), columns - len(start) - len(end), "cyan")
        return Text.assemble((start, "bold"), bar, end)

    def phase_line(self, columns: int) -> Text:
        activity = self._activity()
        phase = phase_in_words(activity.phase)
        counts = [f"{work.done}/{work.total} {work.unit}" for work in activity.work if work.total > 1]
        seconds = format_duration(max(self._clock() - activity.since, 0.0), whole=True)
        end = "  ".join(["", *counts, seconds])
        if not counts:
            return Text(f"{phase}{end}", style="dim")
        width = min(columns // 4, columns - len(phase) - len(end) - 1)
        return Text.assemble((f"{phase} ", "dim"), self.bar(fraction(activity.work), width, "green"), end)

    def metric_lines(self, columns: int) -> list[Text]:
        """Lays out the metrics in cells of equal width.

        Like the overview of the report, it leaves out the held-out score if there is an accuracy, which shows
        the same information on a better scale.
        """
        cells = [
            self.cell(shown.label, shown.metric, shown.format, sparks=columns >= 100)
            for shown in LIVE_VIEW
            if self._history.get(shown.metric)
            and not (shown.metric == "eval/score_mean" and "eval/accuracy" in self._history)
        ]
        width = max((cell_len(cell.plain) for cell in cells), default=0) + 2
        per_line = max(columns // max(width, 1), 1)
        lines = []
        for start in range(0, min(len(cells), per_line * METRIC_LINES), per_line):
            line = Text()
            for cell in cells[start : start + per_line]:
                line.append_text(cell)
                line.append(" " * (width - cell_len(cell.plain)))
            lines.append(line)
        return lines

    def cell(self, label: str, name: str, form: str, sparks: bool) -> Text:
        """Returns a metric with its trend; yellow if the catalogue calls its value unhealthy."""
        values, metric = self._history[name], find(name)
        healthy = metric is None or not outside(metric, values[-1])
        arrow = ("↓→↑" if self._unicode else "v=^")[trend(values) + 1] if len(values) > 1 else " "
        parts = [
            (f"{label} ", "dim"),
            (format_number(values[-1], form), "" if healthy else "yellow"),
            (f" {arrow}", "cyan"),
        ]
        if sparks and self._unicode:
            parts.append((f" {sparkline(values):<{KEPT}}", "cyan"))
        return Text.assemble(*parts)

    def bar(self, done: float, width: int, style: str) -> Text:
        """Returns a bar of ``width`` columns, or nothing if there is little room."""
        if width < 5:
            return Text()
        full = round(min(max(done, 0.0), 1.0) * width)
        filled, empty = ("━", "─") if self._unicode else ("#", "-")
        return Text.assemble((filled * full, style), (empty * (width - full), "dim"))


def phase_in_words(phase: str) -> str:
    """Replaces the code name of a phase of the heartbeat by the label of its time in the catalogue.

    "in the phase 'update_critic'" becomes "update of the critic", and "after the phase 'update_critic'"
    becomes "after update of the critic".
    """

    def label(match: re.Match[str]) -> str:
        metric = find(f"time/{match[1]}")
        return metric.label if metric is not None else match[1].replace("_", " ")

    return re.sub(r"the phase '(\w+)'", label, phase).removeprefix("in ")


def fraction(work: Sequence[Work]) -> float:
    """Returns the part of the work that is done; each entry is a part of one unit of the entry before."""
    part = 0.0
    for level in reversed(work):
        part = min((level.done + part) / max(level.total, 1), 1.0)
    return part


def trend(values: Sequence[float]) -> int:
    """Compares the last value with the mean of the values before it: 1 above, -1 below, 0 about equal.

    About equal means within half a standard deviation of the values before.
    """
    *before, last = values
    change, spread = last - fmean(before), pstdev(before)
    if abs(change) <= max(spread / 2, 1e-9 * abs(last)):
        return 0
    return 1 if change > 0 else -1


def sparkline(values: Sequence[float]) -> str:
    """Draws values as blocks from the lowest to the highest of them."""
    low, high = min(values), max(values)
    if high == low:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in values)
