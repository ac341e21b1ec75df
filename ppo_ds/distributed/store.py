"""Key-value store shared by all ranks, usable at any moment and from any thread.

It transmits failures and stop requests, which must reach ranks even while they wait in a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
PREFIX = "ppo_ds/"
ANSWER_TIMEOUT = 3.0  # longest wait for an answer of the store, in seconds


class StoreUnavailable(ConnectionError):
    """Raised if the store does not answer."""


class StoreClosed(StoreUnavailable):
    """Raised if the process that holds the store (rank 0 or torchrun's agent) has ended."""


class StoreSilent(StoreUnavailable):
    """Raised if no answer comes in time, as if the store's process is suspended or cannot be reached."""


class RankStore:
    """Separate connection of this rank to the process group's store; collectives do not block it.

    No method is a collective. Each method raises StoreClosed or StoreSilent if the store does not answer.
    """

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._calls: SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="store", daemon=True).start()

    def _run(self) -> None:
        """Runs the operations in a thread, since torch waits without a timeout for a suspended process."""
        while True:
            operation, answer = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(operation(self._store))
                except Exception as error:
                    answer.set_exception(error)

    def _call(self, operation: Callable[[dist.Store], T]) -> T:
        """Returns the result of ``operation``.

        After StoreSilent, an operation that was sent takes effect once the store's process continues.
        """
        answer: Future[T] = Future()
        self._calls.put((operation, answer))
        try:
            return answer.result(ANSWER_TIMEOUT)
        except TimeoutError as error:
            answer.cancel()  # if an earlier operation still waits, this one is never sent
            raise StoreSilent from error
        except dist.DistError as error:
            raise StoreClosed(str(error)) from error

    def put(self, key: str, value: str) -> None:
        self._call(lambda store: store.set(PREFIX + key, value))

    def get(self, key: str) -> str | None:
        """Returns the last value that a rank put for ``key``, or None if there is none, without waiting.

        With several machines, anyone who can connect to the port can put a value, so callers must check it.
        """
        if not self._call(lambda store: store.check([PREFIX + key])):
            return None
        return self._call(lambda store: store.get(PREFIX + key)).decode(errors="replace")

    def add(self, key: str, amount: int = 1) -> int:
        """Adds ``amount`` to a shared counter that starts at 0 and returns the sum.

        The addition is atomic: two ranks that add a positive ``amount`` never get the same sum.
        """
        return self._call(lambda store: store.add(PREFIX + key, amount))
