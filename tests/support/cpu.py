"""Limits the CPU time of a block, for tests of code that must not take quadratic time."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises AssertionError once the block has used ``seconds`` of this process's CPU time.

    A loaded machine does not change the result, because waiting does not count.
    """

    def fail(*_: object) -> None:
        raise AssertionError(f"more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
