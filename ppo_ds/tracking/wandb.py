"""Weights & Biases, held at arm's length: whatever it does, training goes on.

wandb may wait at a prompt, for a server that never answers, or in an exit hook. So it lives in a child process without a terminal
(``wandb_child.py``), fed through a pipe by a thread; every wait for it has a bound, after which it is killed. The falls are
online -> offline -> nothing, each with one line of warning. ``metrics.jsonl`` is the record; this is a view of it.
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

from ppo_ds.tracking.tracker import Record

CHILD = Path(__file__).with_name("wandb_child.py")
GONE = (
    "created and deleted"  # how the server says that a run of this id was deleted; the id cannot be had again
)
BACKLOG = 10_000  # messages that may wait for the child before it is taken for stuck


class WandbTracker:
    """``mode`` is online or offline; for disabled no tracker is made at all, and wandb is never imported."""

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
        """The run id is kept in ``run_dir/wandb.id``, so that a resumed run continues its page. Timeouts are in seconds."""
        self.run_dir = Path(run_dir).absolute()
        self._id_file = self.run_dir / "wandb.id"
        self._options = {"project": project, "name": name, "entity": entity, "tags": list(tags)}
        self._mode = mode
        self._start_timeout, self._finish_timeout = start_timeout, finish_timeout
        self._child: _Child | None = None

    def start(self, config: dict[str, Any]) -> None:
        try:
            self._start(config)
        except OSError as error:  # a full disk, no room for another process
            self._stop()
            _warn(f"cannot be started ({error}); going on without it")

    def _start(self, config: dict[str, Any]) -> None:
        run_id = self._kept_id() or secrets.token_hex(4)
        for mode in ("online", "offline") if self._mode == "online" else ("offline",):
            answer = self._launched(mode, run_id, config)
            if GONE in answer.get("failed", ""):
                _warn(f"run {run_id} was deleted on the server; going on as a new one there")
                run_id = secrets.token_hex(4)
                answer = self._launched(mode, run_id, config)
            if "started" in answer:
                print(f"wandb: {mode}; {answer['started']}", flush=True)
                self._id_file.write_text(run_id + "\n")
                return
            _warn(
                f"{mode} failed ({answer['failed']}); going on {'offline' if mode == 'online' else 'without it'}"
            )

    def _kept_id(self) -> str | None:
        """That of before; None where there is none, or no whole one. It becomes a part of file names."""
        text = self._id_file.read_text(errors="replace").strip() if self._id_file.exists() else ""
        return text if re.fullmatch(r"[\w-]{1,64}", text, re.ASCII) else None

    def _launched(self, mode: str, run_id: str, config: dict[str, Any]) -> dict[str, Any]:
        """What came of a child, which is kept where it has started."""
        options = {
            **self._options,
            "mode": mode,
            "id": run_id,
            "dir": str(self.run_dir),
            "init_timeout": self._start_timeout,
            "config": config,
        }
        child = _Child(options, log=self.run_dir / "wandb.log")
        answer = child.answer(self._start_timeout + 15)  # wandb's own limit comes first: it knows why
        if "started" in answer:
            self._child = child
        else:
            child.kill()
        return answer

    def log(self, step: int, metrics: Record) -> None:
        self._send({"log": {key: value for key, value in metrics.items() if value is not None}, "step": step})

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        self._send({"samples": rows, "split": split, "step": step})

    def rewind(self, step: int) -> None:
        """Nothing: its page cannot go back, and shows the steps that were done again twice."""

    def finish(self, summary: dict[str, Any]) -> None:
        self._send({"finish": summary})
        if self._child is None:
            return
        answer = self._child.answer(self._finish_timeout)
        self._stop()
        if "finished" not in answer:
            # killed, wandb loses what it holds back for blocks of 32 KB
            kept = f"metrics.jsonl and samples/ have all of it, {self.run_dir / 'wandb'} most of it, which wandb sync uploads"
            _warn(f"not all was sent ({answer['failed']}); {kept}")
        elif answer["refused"]:
            _warn(
                f"did not take {answer['refused']} message(s) (see {self.run_dir / 'wandb.log'}); metrics.jsonl and samples/ have them"
            )

    def _send(self, message: dict[str, Any]) -> None:
        if self._child is not None and not self._child.send(message):
            self._stop()
            _warn(f"stopped listening (see {self.run_dir / 'wandb.log'}); going on without it")

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Child:
    """The process that runs wandb: messages go in as JSON lines, answers come out as JSON lines. Nothing here ever blocks for long."""

    def __init__(self, options: dict[str, Any], *, log: Path):
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                # -P: the folder of the script holds this module, which must not pass for the wandb package
                [sys.executable, "-P", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # no terminal to ask at, no Ctrl-C
            )
        self._outbox: queue.Queue[dict[str, Any]] = queue.Queue(BACKLOG)
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True, name=f"wandb-{work.__name__}").start()
        self.send(options)

    def send(self, message: dict[str, Any]) -> bool:
        """False where the child is dead or has not read for so long that the backlog is full."""
        if self._process.poll() is not None:
            return False
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            return False
        return True

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer; ``{"failed": why}`` where none comes within ``timeout`` seconds."""
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return {"failed": f"no answer within {timeout:.0f} s"}

    def kill(self) -> None:
        """Ends the child and the service process that wandb started, if they have not ended by themselves within a second."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        with suppress(ProcessLookupError):  # all of them are gone, as they should be
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _write(self) -> None:
        with (
            suppress(BrokenPipeError),
            self._process.stdin as pipe,
        ):  # a broken pipe: the child is dead, as send() says from then on
            while True:
                text = json.dumps(self._outbox.get(), default=str, ensure_ascii=False)
                pipe.write(
                    text.encode(errors="replace") + b"\n"
                )  # half a surrogate pair, as a row may have, would end the child
                pipe.flush()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._inbox.put(json.loads(line))
        self._inbox.put({"failed": "its process ended"})


def _warn(text: str) -> None:
    print(f"warning: wandb {text}", file=sys.stderr, flush=True)
