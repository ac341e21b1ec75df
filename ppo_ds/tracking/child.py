"""Runs the library of a tracker in a child process, so that no failure of it can stop training.

Such a library may wait at a prompt, for a server that never replies, or in an exit hook. It therefore runs in
a child process without a terminal (``child_main.py``), to which a thread sends records through a pipe. The
training waits for the child only when the run starts and when it ends. Each of these waits has a timeout,
after which the child is killed.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppo_ds.errors import printable
from ppo_ds.storage.drafts import open_for_appending
from ppo_ds.tracking.tracker import EventKind, Record
from ppo_ds.types import Histogram

MAX_PENDING = 10_000  # unread messages after which the child counts as hung


class ChildTracker(ABC):
    """Sends the records of a run to a child process; a failure gives a one-line warning.

    A subclass may override ``finish``.
    """

    label: str  # name of the library in warnings
    data_hint: str  # where the data is after an incomplete finish

    def __init__(self, run_dir: str | os.PathLike, *, finish_timeout: float):
        self.run_dir = Path(run_dir).absolute()
        self._log_file = self.run_dir / f"{self.label}.log"
        self._id_file = self.run_dir / f"{self.label}.id"
        self._finish_timeout = finish_timeout  # seconds
        self._child: Child | None = None

    @abstractmethod
    def start(self, config: dict[str, Any]) -> None:
        """Starts the child by ``launch``, or continues without it after a warning."""

    def launch(self, script: Path, options: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Starts a child and returns its first reply; kills the child if it could not start the library."""
        child = Child(script, options, log=self._log_file)
        reply = child.reply(timeout)
        if "started" in reply:
            self._child = child
        else:
            child.kill()
        return reply

    def log(self, step: int, metrics: Record) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        self.send({"step": step, "log": known})

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Sends the rows without their token columns, which only files and report.html show."""
        kept = [{name: cell for name, cell in row.items() if name != "tokens"} for row in rows]
        self.send({"step": step, "samples": kept, "split": split})

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Sends alarms as alerts; other events are not sent."""
        if kind == "alarm":
            self.send({"step": step, "alert": text})

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        self.send({"step": step, "histograms": {name: asdict(one) for name, one in histograms.items()}})

    def rewind(self, step: int) -> None:  # noqa: B027 - no subclass needs to override it
        """Does nothing: the libraries cannot remove steps, and show repeated steps twice."""

    def finish(self, summary: dict[str, Any]) -> None:
        self.send({"finish": summary})
        if self._child is None:
            return
        reply = self._child.reply(self._finish_timeout)
        self.stop()
        if "finished" not in reply:
            self.warn(f"not all data was sent ({reply['failed']}); {self.data_hint}")
        elif reply["refused"]:
            self.warn(
                f"did not accept {reply['refused']} message(s) (see {self._log_file}); "
                "metrics.jsonl and samples/ have them"
            )

    def send(self, message: dict[str, Any]) -> None:
        if self._child is not None and not self._child.send(message):
            self.stop()
            self.warn(f"stopped reading messages (see {self._log_file}); continuing without it")

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def warn(self, text: str) -> None:
        warn(f"{self.label} {text}")


class Child:
    """The process that runs the library; it reads messages and writes replies as JSON lines.

    No method blocks beyond its time limit.
    """

    def __init__(self, script: Path, options: dict[str, Any], *, log: Path):
        with open_for_appending(log) as log_file:
            self._process = subprocess.Popen(
                # -P keeps the script's folder off sys.path, where wandb.py would hide the wandb package
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # no terminal for prompts, and no Ctrl-C from a terminal
            )
        self._outbox: queue.Queue[dict[str, Any]] = queue.Queue(MAX_PENDING)
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True, name=f"{script.stem}-{work.__name__}").start()
        self.send(options)

    def send(self, message: dict[str, Any]) -> bool:
        """Queues a message; returns False if the child is dead or has stopped reading."""
        if self._process.poll() is not None:
            return False
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            return False
        return True

    def reply(self, timeout: float) -> dict[str, Any]:
        """Returns the next reply, or ``{"failed": reason}`` if none arrives within ``timeout`` seconds."""
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return {"failed": f"no reply within {timeout:.0f} s"}

    def kill(self) -> None:
        """Kills the child and its own processes, unless they exit by themselves within a second."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        with suppress(ProcessLookupError):  # the whole process group has exited
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self) -> None:
        # a broken pipe means that the child is dead, which send() reports
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            while True:
                text = json.dumps(self._outbox.get(), default=str, ensure_ascii=False)
                # errors=replace: a lone surrogate in a row must not end this thread
                pipe.write(text.encode(errors="replace") + b"\n")
                pipe.flush()
                self._outbox.task_done()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._inbox.put(json.loads(line))
        self._inbox.put({"failed": "its process ended"})


def warn(text: str) -> None:
    print(printable(f"warning: {text}"), file=sys.stderr, flush=True)


def read_run_id(file: Path) -> str | None:
    """Returns the run id in ``file``, or None if it is not valid as a part of a file name."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return text if re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) else None
