"""Worker processes that call a reward function (worker.py is what they run).

A worker may run code that a response contains, so its replies are JSON, limited in size, and checked again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from ppo_ds.background.pool import NoResult, result_within, start_thread
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
        self.trace = trace


class WorkerProcesses:
    """Runs calls of the function at ``path`` in worker processes, and starts a new one if none is idle."""

    def __init__(self, path: str, timeout_seconds: float):
        self._path, self._timeout_seconds = path, timeout_seconds
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        on_exit(self.kill)

    async def scores(self, arguments: Arguments) -> list[Score]:
        """Runs one call. Its time limit does not include the import of the function in a new process."""
        self._idle = [worker for worker in self._idle if worker.is_running()]
        worker = self._idle.pop() if self._idle else await self._start()
        reply = await self._exchange(worker, self._timeout_seconds, arguments)
        if reply is None:
            raise NoResult(f"gave no result: its worker process {worker.end()}")
        match reply:
            case {"scores": scores}:
                self._idle.append(worker)
                return read_scores(scores, len(arguments[0]))
            case {"invalid": str(reason), "row": 0 | None as row, "remedy": str(remedy)}:
                self._idle.append(worker)
                raise InvalidScore(reason, row, remedy)
            case {"raised": str(line), "where": str(where), "traceback": str(trace)}:
                self._idle.append(worker)
                raise FunctionRaised(line, where, trace)
        worker.end()
        raise NoResult("gave no result: its worker process sent an invalid reply")

    async def _start(self) -> WorkerProcess:
        """Starts a process and waits until the function is imported. Raises RewardError if that fails."""
        worker = WorkerProcess(self._path)
        self._all = [other for other in self._all if other.is_running()] + [worker]
        reply = await self._exchange(worker, None) or {"broken": f"it {worker.end()}"}
        if "broken" in reply:
            raise RewardError(f"a worker process could not import the reward function: {reply['broken']}")
        return worker

    async def _exchange(
        self, worker: WorkerProcess, seconds: float | None, arguments: Arguments | None = None
    ) -> dict[str, Any] | None:
        """Waits for a reply; ends the process if there is none in time, or if the wait is cancelled."""
        try:
            return await result_within(seconds, start_thread(worker.exchange, arguments))
        except BaseException:
            worker.end()
            raise

    def end(self) -> None:
        """Kills all processes and waits until they have ended."""
        for worker in self._all:
            worker.end()

    def kill(self) -> None:
        """Kills all processes; called when this process ends."""
        for worker in self._all:
            worker.kill()


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

    def exchange(self, arguments: Arguments | None) -> dict[str, Any] | None:
        """Sends arguments and waits for the reply; with None, waits until the function is imported.

        Returns None if the process has ended or has sent something else than a JSON object.
        """
        try:
            if arguments is not None:
                self._connection.send(arguments)
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
