"""Keeps report.html up to date while a run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_ds.tracking.html.report import FILE_NAME, write_report
from ppo_ds.tracking.tracker import Record, Tracker

log = logging.getLogger(__name__)
SHARE = 100  # seconds between two reports, for each second that writing one takes


class ReportTracker(Tracker):
    """Writes report.html after the first step, at the end, and in between for at most 1 % of the time.

    In the list of trackers it must follow JsonlTracker, whose files it reads. A failure never ends the run.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic):
        self._run_dir = run_dir
        self._clock = clock
        self._next = clock()  # the earliest time of the next report
        self._warned = False

    def log(self, step: int, metrics: Record) -> None:
        if self._clock() >= self._next:
            self._write(running=True)

    def finish(self, summary: dict[str, Any]) -> None:
        self._write(running=False)

    def _write(self, *, running: bool) -> None:
        """Writes the report. Only the first failure, of any cause, prints a warning."""
        started = self._clock()
        try:
            write_report([self._run_dir], self._run_dir / FILE_NAME, running=running)
        except Exception as error:  # damaged or unusual files must not end a training
            if not self._warned:
                log.warning("warning: %s was not written: %s: %s", FILE_NAME, type(error).__name__, error)
            self._warned = True
        ended = self._clock()
        self._next = ended + SHARE * (ended - started)
