"""Results that are computed in the background while the main thread does other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from operator import call
from typing import Any, Generic, TypeVar

import torch

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.errors import RunError

POLL_SECONDS = 0.5  # interval at which ranks exchange their progress

T = TypeVar("T")
U = TypeVar("U")


class PeerTaskFailed(RunError):
    """Raised on ranks without a failed task if a task of another rank has failed."""


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A result that is already available, or that tasks in other threads are still computing.

    The main thread starts the tasks, does other work, and then calls ``result`` once.
    """

    finish: Callable[[], T]  # computes the result, in the main thread, once all tasks are complete
    tasks: tuple[Future[Any], ...] = ()  # empty if the result is known already
    cancel: Callable[[], None] = lambda: None  # makes the tasks end early; does not wait for them
    # calls a function that computes the result; may be a collective that raises on all ranks if one fails
    agree: Callable[[Callable[[], Any]], Any] = call

    @classmethod
    def of(cls, result: T) -> Pending[T]:
        """Wraps a result that is already available, without tasks."""
        return cls(lambda: result)

    @property
    def completed(self) -> int:
        return sum(task.done() for task in self.tasks)

    @property
    def error(self) -> BaseException | None:
        """The error of the first failed task, or None if no task has failed."""
        return next((error for task in self.tasks if task.done() and (error := task.exception())), None)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until a task fails or all complete, at most ``seconds``; returns whether all are complete."""
        return not wait(self.tasks, seconds, FIRST_EXCEPTION).not_done

    def result(self) -> T:
        """Waits for all tasks and returns the result; if a task fails, cancels the others and raises."""
        self.wait()
        if (error := self.error) is not None:
            self.cancel()
            raise error
        return self.finish()

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """Returns the pending result of ``change``, which the main thread applies to this result.

        If this result has no tasks, it is available and the change is applied at once.
        """
        if not self.tasks:
            return Pending.of(change(self.finish()))
        return replace(self, finish=lambda: change(self.finish()))  # type: ignore[arg-type, return-value]


def all_of(parts: Sequence[Pending[T]]) -> Pending[list[T]]:
    def cancel() -> None:
        for part in parts:
            part.cancel()

    tasks = tuple(task for part in parts for task in part.tasks)
    agree = parts[0].agree if parts else call
    return Pending(lambda: [part.finish() for part in parts], tasks, cancel, agree)


def start_all(starting: Iterable[Pending[T]]) -> list[Pending[T]]:
    """Returns the items of ``starting``, a lazy iterable that starts the tasks of an item when it yields it.

    If starting a task raises an exception, the tasks already started are cancelled.
    """
    started: list[Pending[T]] = []
    try:
        for pending in starting:
            started.append(pending)
    except BaseException:
        all_of(started).cancel()
        raise
    return started


def wait_on_all_ranks(pending: Pending[T], world: World, check: Callable[[], None]) -> T:
    """Waits until the results of all ranks are complete, and returns this rank's result.

    All ranks must call this. ``check`` is a collective that raises Abandoned on all ranks after a stop
    request. Each completed task counts as progress on all ranks, so that slow tasks are not taken for a hang.
    If a task fails, its rank raises the task's error and the other ranks raise PeerTaskFailed, unless
    ``pending.agree`` raises another error on all ranks.
    """

    def raise_for_peer() -> T:
        raise PeerTaskFailed("a task of another rank has failed")

    completed, total = 0, int(world.sum(torch.tensor(len(pending.tasks))))
    try:
        with heartbeat.counting(total, "calls") as done:
            while True:
                ready = pending.wait(POLL_SECONDS)
                check()
                failed = pending.error is not None
                counts = torch.tensor([pending.completed, ready, failed])
                now, ranks_ready, failures = world.sum(counts).tolist()
                if now > completed:
                    heartbeat.beat()
                    done(now)
                if failures or ranks_ready == world.size:
                    found: T = pending.agree(raise_for_peer if failures and not failed else pending.result)
                    return found
                completed = now
    except BaseException:
        pending.cancel()
        raise
