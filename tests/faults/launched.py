"""Starts commands under the real launchers, finds all of their processes, and waits until none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.test_fault_stopping import marked
from tests.support.environment import environment

LIMIT = 300.0  # seconds until a run that hangs, or a process that remains, fails the test


class Launched:
    """A command with a log, and the processes that it has started, whatever their parents are."""

    def __init__(self, command: list[str], log: Path, **more: str):
        self.mark, self.log = f"launched_{uuid.uuid4().hex}", log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=log.parent,
                env=environment(OMP_NUM_THREADS="1", MARK=self.mark, **more),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> list[int]:
        return marked(self.mark)

    def running(self) -> bool:
        """Returns whether any process is left; a process in the middle of an exec has no environment."""
        if self.process.poll() is None or self.pids():
            return True
        time.sleep(0.2)
        return bool(self.pids())

    def rank(self, rank: int) -> int | None:
        """Returns the process id of a rank, or None before it has started and after its end."""
        found = [pid for pid in self.pids() if is_rank(pid, rank)]
        return min(found, default=None)

    def signal_all(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until ``condition`` holds; fails if the command ends before."""
        until = time.monotonic() + LIMIT
        while not condition():
            assert self.process.poll() is None and time.monotonic() < until, f"{what}\n{self.text}"
            time.sleep(0.01)

    def wait(self, limit: float = LIMIT) -> int:
        """Returns the exit code of the command once all processes have ended."""
        until = time.monotonic() + limit
        while self.running():
            assert time.monotonic() < until, f"{self.pids()} are left\n{self.text}"
            time.sleep(0.05)
        return self.process.wait()


def is_rank(pid: int, rank: int) -> bool:
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return (
            f"RANK={rank}".encode() in variables and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    return False
