"""Calls the library of a dashboard in a thread, so that training neither waits for it nor fails with it."""

from __future__ import annotations

import json
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ppo_ds.errors import printable
from ppo_ds.secrets import censored
from ppo_ds.storage.reading import read_text
from ppo_ds.tracking.tracker import EventKind, Record, Tracker
from ppo_ds.types import Histogram

MAX_PENDING = 10_000  # waiting calls after which the library counts as hung
START_TIMEOUT = 120.0  # seconds
FINISH_TIMEOUT = 60.0  # seconds


class Dashboard(Tracker):
    """A tracker whose methods may raise exceptions, and may wait for a server."""

    name: str  # of the library, and of its extra in setup.cfg

    @property
    def finish_timeout(self) -> float:
        """The longest wait for ``finish`` in seconds."""
        return FINISH_TIMEOUT


class BackgroundTracker(Tracker):
    """Calls a dashboard in a thread; after its first failure, prints one warning line and drops it.

    Only ``start`` and ``finish`` wait, for a limited time. Non-finite metrics, and the column "tokens" of
    sample rows, are not passed to the dashboard.
    """

    def __init__(self, dashboard: Dashboard):
        self.dashboard = dashboard
        self._calls: queue.Queue[tuple[Callable[[], None], threading.Event]] = queue.Queue(MAX_PENDING)
        self._dropped = False

    def start(self, config: dict[str, Any]) -> None:
        threading.Thread(target=self._work, name=self.dashboard.name, daemon=True).start()
        self._wait(START_TIMEOUT, self.dashboard.start, plain(config))

    def log(self, step: int, metrics: Record) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        self._send(self.dashboard.log, step, known)

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        kept = [{name: cell for name, cell in row.items() if name != "tokens"} for row in rows]
        self._send(self.dashboard.samples, step, plain(kept), split)

    def event(self, step: int, kind: EventKind, text: str) -> None:
        self._send(self.dashboard.event, step, kind, text)

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        self._send(self.dashboard.histograms, step, histograms)

    def rewind(self, step: int) -> None:
        self._send(self.dashboard.rewind, step)

    def finish(self, summary: dict[str, Any]) -> None:
        self._wait(self.dashboard.finish_timeout, self.dashboard.finish, plain(summary))

    def _send(self, method: Callable[..., None], *arguments: Any) -> threading.Event:
        """Queues a call; the returned event is set when the call is done or the dashboard is dropped."""
        done = threading.Event()
        try:
            self._calls.put_nowait((partial(method, *arguments), done))
        except queue.Full:
            self._drop(f"does not keep up: {MAX_PENDING:,} calls wait")
        if self._dropped:
            done.set()
        return done

    def _wait(self, seconds: float, method: Callable[..., None], *arguments: Any) -> None:
        if not self._send(method, *arguments).wait(seconds):
            self._drop(f"has not ended its {method.__name__} within {seconds:.0f} s")

    def _work(self) -> None:
        while True:
            call, done = self._calls.get()
            try:
                if not self._dropped:
                    call()
            except ModuleNotFoundError:
                name = self.dashboard.name
                self._drop(f"is not installed; run: pip install -c constraints.txt -e '.[{name}]'")
            except (Exception, SystemExit) as error:  # wandb.teardown() calls sys.exit()
                self._drop(f"failed ({first_line(error)})")
            done.set()

    def _drop(self, problem: str) -> None:
        if not self._dropped:
            self._dropped = True
            rest = "continuing without it; metrics.jsonl and samples/ have everything"
            warn(f"{self.dashboard.name} {problem}; {rest}")


def warn(text: str) -> None:
    print(printable(censored(f"warning: {text}")), file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def plain(value: Any) -> Any:
    """Converts ``value`` to JSON types. Lone surrogates, which no library accepts, become ``?``."""
    return json.loads(json.dumps(value, default=str, ensure_ascii=False).encode(errors="replace"))


def run_id(file: Path) -> str:
    """Returns the run id in ``file``, or a new id if the file has none that is usable in file names."""
    text = read_text(file).strip() if file.is_file() else ""
    return text if re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) else secrets.token_hex(4)
