"""Simulates several ranks as threads of one process, with a sum that waits for all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tests.support.threads import run_threads


def on_ranks(size: int, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
    """Runs work(rank, reduce) on each rank and returns the results.

    A rank that calls ``reduce`` less often than the others breaks the barrier.
    """
    barrier = threading.Barrier(size, timeout=300)
    shares: list[Tensor | None] = [None] * size

    def reduce(rank: int, x: Tensor) -> Tensor:
        shares[rank] = x.clone()
        barrier.wait()
        total = sum(shares[1:], start=shares[0])
        barrier.wait()
        return total

    return run_threads(size, lambda rank: work(rank, partial(reduce, rank)), barrier)
