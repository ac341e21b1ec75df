"""Runs the simulated ranks of a test as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_threads(size: int, work: Callable[[int], T], barrier: threading.Barrier) -> list[T]:
    """Runs work(rank) in one thread per rank and returns the results.

    If a rank fails, ``barrier``, on which the others may wait, is aborted, and its exception is raised.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # raised again below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
