"""Runs calls in the background, several at a time, each with a time limit.

The calls wait in one event loop of this process. The code that they wait for runs elsewhere: in a thread, in
the event loop of async user functions, or in a worker process (rewards/processes.py). Only a process can be
ended; a thread that exceeds its limit keeps running, but its result is ignored.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import torch

from ppo_ds.background.pending import Pending
from ppo_ds.background.values import NoResult

R = TypeVar("R")


class Pool:
    """Runs at most ``workers`` calls at a time."""

    def __init__(self, workers: int):
        self._slots = asyncio.Semaphore(workers)

    def start(self, calls: Iterable[Callable[[], Coroutine[Any, Any, R]]]) -> Pending[list[R]]:
        """Starts the calls; returns the pending list of their results in the order of ``calls``.

        If the pending list is cancelled, waiting calls never start, and running calls get a CancelledError.
        """

        async def run(call: Callable[[], Coroutine[Any, Any, R]]) -> R:
            async with self._slots:
                return await call()

        tasks = tuple(start_coroutine(run(call), "calls") for call in calls)

        def cancel() -> None:
            for task in reversed(tasks):  # waiting calls first, so that none takes a freed slot
                task.cancel()

        return Pending(lambda: [task.result() for task in tasks], tasks, cancel)


async def result_within(seconds: float | None, future: Future[R]) -> R:
    """Returns the result of a future of another thread or loop; cancels the future if the wait ends early.

    Raises NoResult after ``seconds`` (None: no limit).
    """
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait([waiting], timeout=seconds)
        if not waiting.done():
            raise NoResult(f"gave no result within {seconds:g} s", timed_out=True)
        return waiting.result()
    finally:
        waiting.cancel()


def start_thread(function: Callable[..., R], *arguments: Any) -> Future[R]:
    """Calls a function in a new daemon thread and returns the future of its result."""
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()  # a running thread cannot be cancelled

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            is_plain = isinstance(error, Exception) and not isinstance(error, CancelledError)
            future.set_exception(error if is_plain else as_plain_error(error))

    Thread(target=run, name="call in a pool", daemon=True).start()
    return future


async def call_user(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function in a new thread; if it returns a coroutine, awaits that in this event loop."""
    result = await result_within(None, start_thread(function, *arguments))
    try:
        return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, Exception) or (task and task.cancelling()):
            raise
        raise as_plain_error(error) from error


def as_plain_error(error: BaseException) -> RuntimeError:
    """Returns a RuntimeError for an exception of user code that would end the event loop or a task in it."""
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def start_coroutine(coroutine: Coroutine[Any, Any, R], loop: str) -> Future[R]:
    """Starts a coroutine in the event loop named ``loop``; cancelling the future ends the coroutine."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop(loop))


@cache
def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """Returns the event loop with this name; the first call starts it in a new thread of this process."""
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
