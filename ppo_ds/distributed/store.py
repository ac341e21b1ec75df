"""Key-value store shared by all ranks, usable at any moment and from any thread.

It transmits failures and stop requests, which must reach ranks even while they wait in a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

PREFIX = "ppo_ds/"


class StoreUnavailable(ConnectionError):
    """Raised if the store does not answer: its process (rank 0 or torchrun's agent) has ended."""


class RankStore:
    """Separate connection of this rank to the process group's store; collectives do not block it.

    No method is a collective. Each method raises StoreUnavailable if the store does not answer.
    """

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._lock = threading.Lock()

    @contextmanager
    def _connection(self) -> Iterator[dist.Store]:
        with self._lock:
            try:
                yield self._store
            except dist.DistError as error:
                raise StoreUnavailable(str(error)) from error

    def put(self, key: str, value: str) -> None:
        with self._connection() as store:
            store.set(PREFIX + key, value)

    def get(self, key: str) -> str | None:
        """Returns the last value that a rank put for ``key``, or None if there is none, without waiting.

        With several machines, anyone who can connect to the port can put a value, so callers must check it.
        """
        with self._connection() as store:
            if not store.check([PREFIX + key]):
                return None
            return store.get(PREFIX + key).decode(errors="replace")

    def add(self, key: str, amount: int = 1) -> int:
        """Adds ``amount`` to a shared counter that starts at 0 and returns the sum.

        The addition is atomic: two ranks that add a positive ``amount`` never get the same sum.
        """
        with self._connection() as store:
            return store.add(PREFIX + key, amount)
