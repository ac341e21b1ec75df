"""Draws the live view of a run on a terminal: progress, the current phase and the last alarm."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ppo_ds.tracking.catalogue import find
from ppo_ds.tracking.formatting import format_duration

KEPT = 12  # steps in the estimate of the remaining time
ALARM_STEPS = 20  # number of steps for which an alarm is shown


@dataclass(eq=False)
class LiveView:
    """The lines below the log of a run. They show only numbers in CPU memory and never wait for a GPU."""

    stage: str
    total: int  # steps of the run
    activity: Callable[[], Any]  # returns the heartbeat of this process (distributed/heartbeat.py)
    _: KW_ONLY
    step: int = 0  # steps that are done
    clock: Callable[[], float] = time.time  # the clock of the heartbeat's ``since``

    def __post_init__(self) -> None:
        self._started = self._logged = self.clock()
        self._durations: deque[float] = deque(maxlen=KEPT)  # seconds from one record to the next
        self._alarm: tuple[int, str] | None = None

    def log(self, step: int) -> None:
        now = self.clock()
        self._durations.append(now - self._logged)
        self.step, self._logged = step, now

    def alarm(self, step: int, text: str) -> None:
        self._alarm = (step, text)

    def rewind(self, step: int) -> None:
        self.step, self._logged = step, self.clock()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        left = self.seconds_left()
        times = f"{format_duration(self.clock() - self._started, whole=True)}, "
        times += "time left not known yet" if left is None else f"{format_duration(left, whole=True)} left"
        end = f"step {self.step}/{self.total}  {times}"
        yield bar_line(Text(self.stage, "bold"), self.step / max(self.total, 1), end)
        activity = self.activity()
        phase = phase_in_words(activity.phase)
        counts = [f"{work.done}/{work.total} {work.unit}" for work in activity.work if work.total > 1]
        end = "  ".join([*counts, format_duration(max(self.clock() - activity.since, 0.0), whole=True)])
        line = bar_line(Text(phase, "dim"), fraction(activity.work), end)
        yield line if counts else Text(f"{phase}  {end}", "dim")
        if self._alarm is not None and self.step - self._alarm[0] < ALARM_STEPS:
            text = f"alarm at step {self._alarm[0]}: {self._alarm[1]}"
            yield Text(text, "bold yellow", no_wrap=True, overflow="ellipsis")

    def seconds_left(self) -> float | None:
        """Estimates the seconds to the end of the run from the latest steps; None before the first step."""
        if not self._durations:
            return None
        each, steps = fmean(self._durations), self.total - self.step
        return max(each * steps - (self.clock() - self._logged), each * (steps - 1), 0.0)


def bar_line(start: Text, done: float, end: str) -> Table:
    """Returns a line of two texts and a bar between them, which is filled to the fraction ``done``."""
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(start, ProgressBar(total=1.0, completed=done), end)
    return line


def phase_in_words(phase: str) -> str:
    """Replaces the code name of a phase in the heartbeat by the label of its time/* metric.

    "in the phase 'update_critic'" becomes "update of the critic", and "after the phase 'update_critic'"
    becomes "after update of the critic".
    """

    def label(match: re.Match[str]) -> str:
        metric = find(f"time/{match[1]}")
        return metric.label if metric is not None else match[1].replace("_", " ")

    return re.sub(r"the phase '(\w+)'", label, phase).removeprefix("in ")


def fraction(work: Sequence[Any]) -> float:
    """Returns the completed fraction of nested work, such as prompts of batches; outermost level first."""
    part = 0.0
    for level in reversed(work):
        part = min((level.done + part) / max(level.total, 1), 1.0)
    return part
