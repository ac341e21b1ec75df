"""Pool that runs a user's code in the background, several calls at a time, each with a time limit.

A call runs in a thread, as a coroutine in an event loop, or in a worker process (rewards/processes.py). Only
a process can be ended: a thread that exceeds its limit keeps running, without effect on the results. Reward
functions use all three kinds of calls, environments (ppo_ds/environments/) use threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from threading import TIMEOUT_MAX, Thread
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R")
Item = TypeVar("Item")


class NoResult(Exception):
    """Raised for a call without a result: it exceeded its time limit (``timed_out``), or its process died."""

    def __init__(self, reason: str, timed_out: bool = False):
        super().__init__(reason)
        self.timed_out = timed_out


class CallCancelled(Exception):
    """Raised for a call that was cancelled."""


@dataclass(frozen=True)
class Call(Generic[R]):
    """One running call."""

    future: Future[R]
    abandon: Callable[[], object] = lambda: None  # ends the call, if that is possible


class Cancellation:
    """A request to cancel calls."""

    def __init__(self) -> None:
        self._request: Future[Any] = Future()

    def request(self) -> None:
        if not self.is_requested():
            self._request.set_result(None)

    def is_requested(self) -> bool:
        return self._request.done()

    def wait(self, future: Future[Any], seconds: float = TIMEOUT_MAX) -> None:
        """Waits at most ``seconds`` until the future is complete or a cancellation is requested."""
        wait([future, self._request], min(seconds, TIMEOUT_MAX), FIRST_COMPLETED)


class Pool(Generic[A, R]):
    """Runs calls, at most ``workers`` at a time.

    Args:
        start: Starts a call; raises CallCancelled if a cancellation is requested before the call has begun.
        workers: The number of simultaneous calls.
        timeout_seconds: The time limit of one call, which begins when the call starts.
        close: Ends the processes of the pool, if it has any. The next call would start new ones.
    """

    def __init__(
        self,
        start: Callable[[A, Cancellation], Call[R]],
        workers: int,
        timeout_seconds: float,
        close: Callable[[], None] = lambda: None,
    ):
        self._start, self._timeout, self.close = start, timeout_seconds, close
        self._threads = ThreadPoolExecutor(workers, "calls")

    def start(
        self, task: Callable[[Item, Callable[[A], R]], T], items: Iterable[Item]
    ) -> tuple[tuple[Future[T], ...], Callable[[], None]]:
        """Runs ``task(item, call)`` for each item in the pool's threads.

        ``call`` runs one call and returns its result. It raises NoResult if there is none, CallCancelled once
        the tasks are cancelled, and otherwise what the called function raises. Returns the tasks, and a
        function that cancels them.
        """
        cancellation = Cancellation()

        def call(arguments: A) -> R:
            return self._run(arguments, cancellation)

        return tuple(self._threads.submit(task, item, call) for item in items), cancellation.request

    def _run(self, arguments: A, cancellation: Cancellation) -> R:
        if cancellation.is_requested():
            raise CallCancelled
        call = self._start(arguments, cancellation)
        cancellation.wait(call.future, self._timeout)
        if call.future.done():
            return call.future.result()
        call.abandon()
        if cancellation.is_requested():
            raise CallCancelled
        raise NoResult(f"gave no result within {self._timeout:g} s", timed_out=True)


def start_thread(function: Callable[..., R], *arguments: Any) -> Future[R]:
    """Calls a function in a new thread, which does not keep the process from ending."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # also SystemExit
            future.set_exception(error)

    Thread(target=run, name="call in a pool", daemon=True).start()
    return future


def start_coroutine(coroutine: Coroutine[Any, Any, R], loop: str) -> Future[R]:
    """Starts a coroutine in the event loop of that name; to cancel the future ends the coroutine."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop(loop))


@cache
def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Returns an event loop of this process, which runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def torch_rng_snapshot() -> Callable[[], None]:
    """Returns a function that restores the current state of torch's random generators."""
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return restore
