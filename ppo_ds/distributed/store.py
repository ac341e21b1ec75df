"""Key-value store shared by all ranks, usable at any moment and from any thread.

It carries failures and stop requests, which ranks must learn of even while they wait in a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

PREFIX = "ppo_ds/"


class StoreUnavailable(ConnectionError):
    """The store does not answer: the process that holds it (rank 0, or torchrun's agent) has ended."""


class RankStore:
    """This rank's own connection to the store of the process group, so that no collective blocks it.

    No method is a collective, and each raises StoreUnavailable.
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
        """Sets ``key`` to ``value``."""
        with self._connection() as store:
            store.set(PREFIX + key, value)

    def get(self, key: str) -> str | None:
        """Returns the value that a rank put last, or None without one. Never waits for a value.

        On several machines, anyone who reaches the store's port can put a value: callers check what they get.
        """
        with self._connection() as store:
            if not store.check([PREFIX + key]):
                return None
            return store.get(PREFIX + key).decode(errors="replace")

    def add(self, key: str, amount: int = 1) -> int:
        """Adds ``amount`` to a shared counter that starts at 0 and returns the sum.

        The addition is atomic: no two ranks that add get the same sum.
        """
        with self._connection() as store:
            return store.add(PREFIX + key, amount)
