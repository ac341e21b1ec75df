"""Worker processes that call a reward function (worker.py is what they run).

A worker may run code that a response contains, so its replies are not trusted: they are JSON, limited in
size, and their scores are checked again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from threading import Lock
from typing import Any

from ppo_ds.background.pool import Call, CallCancelled, Cancellation, NoResult, start_thread
from ppo_ds.distributed.exit import on_exit
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.user_function import Arguments, InvalidScore, Score, read_scores

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ppo_ds.rewards.worker import main; "
_BOOT += "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
_MAX_REPLY = 2**24  # bytes


class FunctionRaised(Exception):
    """Raised for an exception of the function in a worker process; quotes the traceback of that process."""

    def __init__(self, line: str, where: str, trace: str):
        super().__init__(f"{line}\n\nIn the worker process:\n{trace}")
        self.line = line  # type and message of the exception
        self.where = where  # FILE:LINE


class WorkerProcesses:
    """Starts calls in worker processes, and a new process if none is idle."""

    def __init__(self, path: str):
        self._path = path
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        self._lock = Lock()
        on_exit(self.kill)

    def start(self, arguments: Arguments, cancellation: Cancellation) -> Call[list[Score]]:
        """Starts a call. Its time limit does not include the import of the function in a new process."""
        with self._lock:
            self._idle = [worker for worker in self._idle if worker.is_running()]
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = WorkerProcess(self._path)
            with self._lock:
                self._all = [other for other in self._all if other.is_running()] + [worker]
            worker.await_import(cancellation)
        return Call(start_thread(self._scores, worker, arguments), worker.end)

    def end(self) -> None:
        """Kills all processes and waits until they have ended."""
        for worker in self._all:
            worker.end()

    def kill(self) -> None:
        """Kills all processes; called when this process ends."""
        for worker in self._all:
            worker.kill()

    def _scores(self, worker: WorkerProcess, arguments: Arguments) -> list[Score]:
        """Runs one call in a process, and makes the process available for the next call."""
        worker.send(arguments)
        reply = worker.receive()
        if reply is None:
            raise NoResult(f"gave no result: its worker process {worker.end()}")
        with self._lock:
            self._idle.append(worker)
        match reply:
            case {"scores": scores}:
                return read_scores(scores, len(arguments[0]))
            case {"invalid": str(reason), "row": 0 | None as row, "remedy": str(remedy)}:
                raise InvalidScore(reason, row, remedy)
            case {"raised": str(line), "where": str(where), "traceback": str(trace)}:
                raise FunctionRaised(line, where, trace)
        worker.end()
        raise NoResult("gave no result: its worker process sent an invalid reply")


class WorkerProcess:
    """A process that imports a reward function and runs one call at a time."""

    def __init__(self, path: str):
        """Starts the process; ``path`` is that of the function."""
        self._connection, other_end = Pipe()
        # a set of texts is iterated in the same order by every worker and in every run
        environment = {"PYTHONHASHSEED": "0"} | os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT]
            + [json.dumps(sys.path), str(other_end.fileno()), str(os.getpid()), path],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[other_end.fileno()],
            start_new_session=True,  # no signals of the terminal, and a process group to kill
        )
        other_end.close()

    def await_import(self, cancellation: Cancellation) -> None:
        """Waits until the function is imported. Raises RewardError if that fails."""
        imported = start_thread(self.receive)
        cancellation.wait(imported)
        if not imported.done():
            self.end()
            raise CallCancelled
        reply = imported.result() or {"broken": f"it {self.end()}"}
        if "broken" in reply:
            raise RewardError(f"a worker process could not import the reward function: {reply['broken']}")

    def send(self, arguments: Arguments) -> None:
        with suppress(BrokenPipeError):  # the process has ended, which ``receive`` reports
            self._connection.send(arguments)

    def receive(self) -> dict[str, Any] | None:
        """Waits for a reply; returns None if the process has ended or has sent something else."""
        try:
            reply = json.loads(self._connection.recv_bytes(_MAX_REPLY))
        except (EOFError, OSError, ValueError, RecursionError):
            return None
        return reply if isinstance(reply, dict) else None

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> str:
        """Kills the process if necessary and describes how it ended."""
        self.kill()
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kills the process and the processes that it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
