"""Short texts that ranks leave for each other at any moment, from any thread: what must be known while others wait in a collective."""

from __future__ import annotations

import threading

import torch.distributed as dist

PREFIX = "ppo_ds/"


class StoreUnavailable(ConnectionError):
    """The store does not answer: the process that holds it (rank 0, or torchrun's agent) has ended."""


class RankStore:
    """A connection of this rank's own to the store that all ranks met at, so that no waiting of the process group holds it up. No collective."""

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._lock = threading.Lock()

    def put(self, name: str, text: str) -> None:
        """Raises Gone, as the others do."""
        with self._lock:
            try:
                self._store.set(PREFIX + name, text)
            except dist.DistError as error:
                raise StoreUnavailable(str(error)) from error

    def get(self, name: str) -> str | None:
        """What any rank put under that name last; None where nobody did. Returns at once."""
        with self._lock:
            try:
                return self._store.get(PREFIX + name).decode() if self._store.check([PREFIX + name]) else None
            except dist.DistError as error:
                raise StoreUnavailable(str(error)) from error

    def count(self, name: str, more: int = 1) -> int:
        """Adds to a number that all ranks share, 0 at first, and gives what it is then. Two ranks never see the same one after adding."""
        with self._lock:
            try:
                return self._store.add(PREFIX + name, more)
            except dist.DistError as error:
                raise StoreUnavailable(str(error)) from error
