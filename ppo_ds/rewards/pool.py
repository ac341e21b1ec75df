"""Pool that runs a user's code in the background, several calls at a time, each with a time limit.

A call runs in a thread, as a coroutine in an event loop, or in a worker process (worker.py). Only a process
can be ended: a thread that exceeds its limit keeps running, without effect on the results. Reward functions
use all three kinds of calls, environments (ppo_ds/environments/) use threads.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from multiprocessing import Pipe
from threading import Event, Lock, Thread
from typing import Any, Generic, Protocol, TypeVar

from ppo_ds.distributed.exit import on_exit
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.user_function import (
    Arguments,
    InvalidScore,
    Score,
    call_function,
    is_async,
    read_scores,
)

_POLL_SECONDS = 0.2  # interval at which a waiting thread checks for cancellation and for its time limit
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ppo_ds.rewards.worker import main; "
_BOOT += "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"

T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class NoResult(Exception):
    """Raised for a call without a result: it exceeded its time limit (``timed_out``), or its process died."""

    def __init__(self, reason: str, timed_out: bool):
        super().__init__(reason)
        self.timed_out = timed_out


class FunctionRaised(Exception):
    """Raised for an exception of the function in a worker process; quotes the traceback of that process."""

    def __init__(self, line: str, where: str, trace: str):
        super().__init__(f"{line}\n\nIn the worker process:\n{trace}")
        self.line = line  # type and message of the exception
        self.where = where  # FILE:LINE


class Call(Protocol[R_co]):
    """One running call."""

    def poll(self, seconds: float) -> bool:
        """Waits at most ``seconds`` and returns whether the call is complete."""
        ...

    def result(self) -> R_co:
        """Returns the result of a complete call, or raises its error."""
        ...

    def abandon(self) -> None:
        """Ends a call whose result is not needed, if that is possible."""
        ...


class Pool(Generic[A, R]):
    """Runs calls, at most ``workers`` at a time.

    Args:
        start: Starts a call; raises CancelledError if the event is set before the call has begun.
        workers: The number of simultaneous calls.
        timeout_seconds: The time limit of one call, which begins when the call starts.
        close: Ends the processes of the pool, if it has any. The next call would start new ones.
    """

    def __init__(
        self,
        start: Callable[[A, Event], Call[R]],
        workers: int,
        timeout_seconds: float,
        close: Callable[[], None] = lambda: None,
    ):
        self._start, self._timeout, self.close = start, timeout_seconds, close
        self._threads = ThreadPoolExecutor(workers, "calls")

    def submit(self, task: Callable[..., T], *arguments: Any) -> Future[T]:
        """Runs a task that calls ``run`` in one of the pool's threads."""
        return self._threads.submit(task, *arguments)

    def run(self, arguments: A, cancelled: Event) -> R:
        """Runs one call and returns its result.

        Raises NoResult if there is none, CancelledError once ``cancelled`` is set, and otherwise what the
        called function raises.
        """
        if cancelled.is_set():
            raise CancelledError
        call = self._start(arguments, cancelled)
        deadline, complete = time.monotonic() + self._timeout, False
        try:
            while not (complete := call.poll(_POLL_SECONDS)):
                if cancelled.is_set():
                    raise CancelledError
                if time.monotonic() > deadline:
                    raise NoResult(f"gave no result within {self._timeout:g} s", timed_out=True)
        finally:
            if not complete:
                call.abandon()
        return call.result()


def make_pool(
    path: str, function: Callable[..., Any], kind: str, workers: int, timeout_seconds: float
) -> Pool[Arguments, list[Score]] | None:
    """Makes the pool of a reward function, or returns None if it is to be called in the main thread.

    An async function without a pool runs in the background too, in one call with all responses.
    """
    if kind == "process":
        processes = WorkerProcesses(path)
        return Pool(processes.start, workers, timeout_seconds, processes.end)
    if kind == "thread":
        if is_async(function):
            return Pool(partial(start_coroutine, function), workers, timeout_seconds)
        return Pool(partial(start_thread, partial(call_function, function)), workers, timeout_seconds)
    return Pool(partial(start_coroutine, function), 1, math.inf) if is_async(function) else None


class FutureCall(Generic[R]):
    """A call in a thread or in an event loop."""

    def __init__(self, future: Future[R]):
        self._future = future

    def poll(self, seconds: float) -> bool:
        return bool(wait([self._future], seconds).done)

    def result(self) -> R:
        return self._future.result()

    def abandon(self) -> None:
        self._future.cancel()  # has no effect on a thread


def start_thread(function: Callable[[A], R], arguments: A, cancelled: Event) -> FutureCall[R]:
    """Starts a call in a new thread, which does not keep the process from ending."""
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(function(arguments))
        except BaseException as error:  # also SystemExit
            future.set_exception(error)

    Thread(target=run, name="call in a pool", daemon=True).start()
    return FutureCall(future)


def start_coroutine(
    function: Callable[..., Any], arguments: Arguments, cancelled: Event
) -> FutureCall[list[Score]]:
    """Starts a call of an async function in the event loop that all such calls share."""

    async def run() -> list[Score]:
        count = len(arguments[0])  # before the call, since the function may modify the lists
        return read_scores(await function(*arguments), count)

    return FutureCall(asyncio.run_coroutine_threadsafe(run(), event_loop()))


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns this process's event loop for reward functions, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="reward event loop", daemon=True).start()
    return loop


class WorkerProcesses:
    """Starts calls in worker processes, and a new process if none is idle."""

    def __init__(self, path: str):
        self._path = path
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []
        self._lock = Lock()
        on_exit(self.kill)

    def start(self, arguments: Arguments, cancelled: Event) -> ProcessCall:
        """Starts a call. Its time limit does not include the import of the function in a new process."""
        with self._lock:
            self._idle = [worker for worker in self._idle if worker.is_running()]
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = WorkerProcess(self._path)
            with self._lock:
                self._all = [other for other in self._all if other.is_running()] + [worker]
            worker.await_import(cancelled)
        worker.send(arguments)
        return ProcessCall(worker, self.release)

    def release(self, worker: WorkerProcess) -> None:
        """Makes a process available for the next call."""
        with self._lock:
            self._idle.append(worker)

    def end(self) -> None:
        """Kills all processes and waits until they have ended."""
        for worker in self._all:
            worker.end()

    def kill(self) -> None:
        """Kills all processes; called when this process ends."""
        for worker in self._all:
            worker.kill()


class ProcessCall:
    """A call in a worker process."""

    def __init__(self, worker: WorkerProcess, release: Callable[[WorkerProcess], None]):
        self._worker, self._release = worker, release

    def poll(self, seconds: float) -> bool:
        return self._worker.poll(seconds)

    def result(self) -> list[Score]:
        try:
            reply = self._worker.receive()
        except EOFError:
            reason = f"gave no result: its worker process {self._worker.end()}"
            raise NoResult(reason, timed_out=False) from None
        self._release(self._worker)
        if "invalid" in reply:
            raise InvalidScore(reply["invalid"], reply["row"], reply["remedy"])
        if "raised" in reply:
            raise FunctionRaised(reply["raised"], reply["where"], reply["traceback"])
        return reply["scores"]

    def abandon(self) -> None:
        self._worker.end()


class WorkerProcess:
    """A process that imports a reward function and runs one call at a time (worker.py)."""

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

    def await_import(self, cancelled: Event) -> None:
        """Waits until the function is imported. Raises RewardError if that fails."""
        while not self.poll(_POLL_SECONDS):
            if cancelled.is_set():
                self.kill()
                raise CancelledError
        try:
            reply = self.receive()
        except EOFError:
            reply = {"broken": f"it {self.end()}"}
        if "broken" in reply:
            raise RewardError(f"a worker process could not import the reward function: {reply['broken']}")

    def send(self, arguments: Arguments) -> None:
        with suppress(BrokenPipeError):  # the process has ended, which ``receive`` reports
            self._connection.send(arguments)

    def poll(self, seconds: float) -> bool:
        """Waits at most ``seconds`` and returns whether a reply has arrived or the process has ended."""
        return self._connection.poll(seconds)

    def receive(self) -> dict[str, Any]:
        """Returns the reply, or raises EOFError if the process has ended."""
        try:
            # not unpickled, since a worker may run code that a response contains, and this process must not
            return json.loads(self._connection.recv_bytes())
        except OSError:  # the connection was reset
            raise EOFError from None

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
