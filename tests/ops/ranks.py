"""Simulates several ranks in one process by threads, with a sum that waits for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor


def on_ranks(size: int, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
    """Runs work(rank, reduce) on each rank and returns the results.

    A rank that calls ``reduce`` less often than the others breaks the barrier.
    """
    barrier = threading.Barrier(size, timeout=300)
    shares: list[Tensor | None] = [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def reduce(x: Tensor) -> Tensor:
            shares[rank] = x.clone()
            barrier.wait()
            total = sum(shares[1:], start=shares[0])
            barrier.wait()
            return total

        try:
            results[rank] = work(rank, reduce)
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
