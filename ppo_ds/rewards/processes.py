"""Worker processes that call a reward function (they run worker.py).

A worker may run code that a response contains, so its replies are JSON, limited in size, and validated. Each
call has a random number that the reply must repeat, so that no reply can be sent before its call.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from ppo_ds.background.pool import result_within, start_thread
from ppo_ds.background.values import NoResult, is_float32, quoted
from ppo_ds.distributed.exit import on_exit
from ppo_ds.errors import printable, single_line
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.user_function import Arguments, InvalidScore, Score

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ppo_ds.rewards.worker import main; "
_BOOT += "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
_MAX_REPLY = 2**22  # bytes of the reply to one call, which scores one response


class FunctionRaised(Exception):
    """Raised if the function raises in a worker process; includes the traceback of that process."""

    def __init__(self, line: str, where: str, trace: str):
        super().__init__(f"{line}\n\nIn the worker process:\n{trace}")
        self.line = line  # type and message of the exception
        self.where = where  # FILE:LINE
        self.trace = trace


class WorkerFailed(Exception):
    """Raised if a worker process ended or sent an invalid reply; the message says which."""


class WorkerProcesses:
    """Runs calls of the function at ``path`` in worker processes; starts a process if none is idle."""

    def __init__(self, path: str, timeout_seconds: float):
        self._path, self._timeout_seconds = path, timeout_seconds
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        on_exit(self.end)

    async def scores(self, arguments: Arguments) -> list[Score]:
        """Runs one call. Importing the function in a new process does not count towards the time limit."""
        while self._idle and not self._idle[-1].is_idle():
            self._idle.pop().end()
        worker = self._idle.pop() if self._idle else await self._start()
        number, count = secrets.token_hex(8), len(arguments[0])
        rows = [None, *range(count)]
        try:
            sent = await self._exchange(worker, self._timeout_seconds, (number, arguments))
        except WorkerFailed as error:
            raise NoResult(f"gave no result: its worker process {error}") from None
        match _decoded(sent, number):
            case {"scores": list(scores)} if len(scores) == count and all(map(_is_score, scores)):
                self._idle.append(worker)
                return scores
            case {"invalid": str(reason), "row": None | int() as row, "remedy": str(remedy)} if row in rows:
                self._idle.append(worker)
                raise InvalidScore(single_line(reason), row, single_line(remedy))
            case {"no_result": str(reason)}:
                self._idle.append(worker)
                raise NoResult(single_line(reason))
            case {"raised": str(line), "where": str(where), "traceback": str(trace)}:
                self._idle.append(worker)
                shown = "\n".join(map(printable, trace[-20_000:].splitlines()))
                raise FunctionRaised(single_line(line), single_line(where), shown)
        worker.end()
        shown = quoted(sent[:100].decode(errors="replace"))
        raise NoResult(f"gave no result: its worker process sent an invalid reply: {shown}")

    async def _start(self) -> WorkerProcess:
        """Starts a process and waits until the function is imported; raises RewardError if this fails."""
        worker = WorkerProcess(self._path)
        self._all = [other for other in self._all if not other.has_ended()] + [worker]
        try:
            reply = _decoded(await self._exchange(worker, None), None)
        except WorkerFailed as error:
            reply = {"broken": f"it {error}"}
        if "ready" not in reply:
            worker.end()
            reason = reply.get("broken", "it sent an invalid reply")
            raise RewardError(f"a worker process could not import the reward function: {reason}")
        return worker

    async def _exchange(
        self, worker: WorkerProcess, seconds: float | None, call: tuple[str, Arguments] | None = None
    ) -> bytes:
        """Waits for a reply; ends the process if the reply is late or the wait is cancelled."""
        try:
            return await result_within(seconds, start_thread(worker.exchange, call))
        except BaseException:
            worker.end()
            raise

    def end(self) -> None:
        """Kills all processes and waits until they have ended."""
        for worker in self._all:
            worker.end()


class WorkerProcess:
    """A process that imports a reward function and runs one call at a time."""

    def __init__(self, path: str):
        """Starts the process, which imports the function at ``path``."""
        self._connection, other_end = Pipe()
        # all workers and all runs iterate over a set of texts in the same order
        environment = {"PYTHONHASHSEED": "0"} | os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT]
            + [json.dumps(sys.path), str(other_end.fileno()), str(os.getpid()), path],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[other_end.fileno()],
            start_new_session=True,  # no signals from the terminal; a process group to kill
        )
        other_end.close()

    def exchange(self, call: tuple[str, Arguments] | None) -> bytes:
        """Sends the number and the arguments of a call and waits for the reply, which is not validated.

        With None, waits for the function's import. Without a reply, ends the process and raises WorkerFailed.
        """
        try:
            if call is not None:
                self._connection.send(call)
            return self._connection.recv_bytes(_MAX_REPLY)
        except (EOFError, ConnectionError):
            how = self.end()
            raise WorkerFailed(f"{how} or closed its connection" if "SIGKILL" in how else how) from None
        except OSError as error:  # reply too long or incomplete
            self.end()
            raise WorkerFailed(f"sent an invalid reply: {error}") from None

    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def is_idle(self) -> bool:
        """Returns whether the process runs and has sent nothing since its last reply.

        A process that has ended by itself is not reaped here, since its group number must stay in use until
        ``end`` has killed the group.
        """
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return not (
            self.has_ended() or os.waitid(os.P_PID, self._process.pid, ended) or self._connection.poll()
        )

    def end(self) -> str:
        """Kills the process and those that it started, unless ``end`` already has; describes how it ended."""
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)  # ends a wait even if an escaped child keeps the other end
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _decoded(sent: bytes, number: str | None) -> dict[str, Any]:
    """Returns the fields of a reply to the call ``number``, or {} if ``sent`` is no such reply."""
    with suppress(ValueError, RecursionError):
        reply = json.loads(sent)
        if isinstance(reply, dict) and reply.get("call") == number:
            return reply
    return {}


def _is_score(value: Any) -> bool:
    """Returns whether a value of a reply is a valid score of a response, as from ``read_scores``."""
    numbers = value if isinstance(value, list) else [value]
    return all(isinstance(number, float) and is_float32(number) for number in numbers)
