"""Logs to Weights & Biases from a child process, so that no failure of wandb can stop or delay training.

wandb may wait at a prompt, for a server that never replies, or in an exit hook. It therefore runs in a child
process without a terminal (``wandb_child.py``), to which a thread sends records through a pipe. Every wait
for the child has a timeout, after which the child is killed. After a failure, online mode falls back to
offline mode, and offline mode to no wandb, with a one-line warning each time. ``metrics.jsonl`` remains the
complete record.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_ds.errors import printable
from ppo_ds.storage.drafts import open_for_appending, write_file
from ppo_ds.tracking.tracker import EventKind, Record

CHILD = Path(__file__).with_name("wandb_child.py")
DELETED = "created and deleted"  # the server's message for the id of a deleted run, which cannot be reused
MAX_PENDING = 10_000  # unread messages after which the child counts as hung
START_MARGIN = 15.0  # extra seconds, so that wandb can report its own start timeout with the cause


class WandbTracker:
    """Logs to wandb in online or offline mode. In disabled mode no tracker is created."""

    def __init__(
        self,
        run_dir: str | os.PathLike,
        *,
        mode: str,
        project: str,
        name: str,
        entity: str | None = None,
        tags: Sequence[str] = (),
        start_timeout: float = 30.0,
        finish_timeout: float = 60.0,
    ):
        """Initializes the tracker; timeouts are in seconds.

        The run id is stored in ``run_dir/wandb.id``, so that a resumed run continues the same wandb run.
        """
        self.run_dir = Path(run_dir).absolute()
        self._id_file = self.run_dir / "wandb.id"
        self._options = {"project": project, "name": name, "entity": entity, "tags": list(tags)}
        self._mode = mode
        self._start_timeout, self._finish_timeout = start_timeout, finish_timeout
        self._child: _Child | None = None

    def start(self, config: dict[str, Any]) -> None:
        """Starts wandb; falls back from online to offline, and from offline to no wandb."""
        try:
            run_id = read_run_id(self._id_file) or secrets.token_hex(4)
            for mode in ("online", "offline") if self._mode == "online" else ("offline",):
                reply = self._launch(mode, run_id, config)
                if DELETED in reply.get("failed", ""):
                    _warn(f"run {run_id} was deleted on the server; continuing as a new run")
                    run_id = secrets.token_hex(4)
                    reply = self._launch(mode, run_id, config)
                if "started" in reply:
                    print(printable(f"wandb: {mode}; {reply['started']}"), flush=True)
                    write_file(self._id_file, run_id + "\n")
                    return
                fallback = "offline" if mode == "online" else "without it"
                _warn(f"{mode} failed ({reply['failed']}); continuing {fallback}")
        except OSError as error:  # the disk is full, or no process can be created
            self._stop()
            _warn(f"cannot be started ({error}); continuing without it")

    def _launch(self, mode: str, run_id: str, config: dict[str, Any]) -> dict[str, Any]:
        """Starts a child and returns its first reply; kills the child if it could not start wandb."""
        options = {
            **self._options,
            "mode": mode,
            "id": run_id,
            "dir": str(self.run_dir),
            "init_timeout": self._start_timeout,
            "config": config,
        }
        child = _Child(options, log=self.run_dir / "wandb.log")
        reply = child.reply(self._start_timeout + START_MARGIN)
        if "started" in reply:
            self._child = child
        else:
            child.kill()
        return reply

    def log(self, step: int, metrics: Record) -> None:
        self._send({"log": {key: value for key, value in metrics.items() if value is not None}, "step": step})

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        self._send({"samples": rows, "split": split, "step": step})

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Does nothing."""

    def rewind(self, step: int) -> None:
        """Does nothing: wandb cannot remove steps, and shows repeated steps twice."""

    def finish(self, summary: dict[str, Any]) -> None:
        self._send({"finish": summary})
        if self._child is None:
            return
        reply = self._child.reply(self._finish_timeout)
        self._stop()
        if "finished" not in reply:
            # when wandb is killed, up to 32 KB that it has buffered are lost
            _warn(
                f"not all data was sent ({reply['failed']}); metrics.jsonl and samples/ have all of it, "
                f"{self.run_dir / 'wandb'} has most of it, which wandb sync uploads"
            )
        elif reply["refused"]:
            _warn(
                f"did not accept {reply['refused']} message(s) (see {self.run_dir / 'wandb.log'}); "
                "metrics.jsonl and samples/ have them"
            )

    def _send(self, message: dict[str, Any]) -> None:
        if self._child is not None and not self._child.send(message):
            self._stop()
            _warn(f"stopped reading messages (see {self.run_dir / 'wandb.log'}); continuing without it")

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def read_run_id(file: Path) -> str | None:
    """Returns the run id in ``file``, or None if it is not valid as a part of a file name."""
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return text if re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) else None


class _Child:
    """The process that runs wandb; it reads messages and writes replies as JSON lines.

    No method blocks beyond its time limit.
    """

    def __init__(self, options: dict[str, Any], *, log: Path):
        with open_for_appending(log) as log_file:
            self._process = subprocess.Popen(
                # -P keeps the script's folder off sys.path, where wandb.py would hide the wandb package
                [sys.executable, "-P", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # no terminal for prompts, and no Ctrl-C from a terminal
            )
        self._outbox: queue.Queue[dict[str, Any]] = queue.Queue(MAX_PENDING)
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True, name=f"wandb-{work.__name__}").start()
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
        """Kills the child and wandb's service process, unless they exit by themselves within a second."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        with suppress(ProcessLookupError):  # the whole process group has exited
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self) -> None:
        # a broken pipe means that the child is dead, which send() reports
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            while True:
                text = json.dumps(self._outbox.get(), default=str, ensure_ascii=False)
                # errors=replace: a lone surrogate in a row must not end this thread
                pipe.write(text.encode(errors="replace") + b"\n")
                pipe.flush()
                self._outbox.task_done()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._inbox.put(json.loads(line))
        self._inbox.put({"failed": "its process ended"})


def _warn(text: str) -> None:
    print(printable(f"warning: wandb {text}"), file=sys.stderr, flush=True)
