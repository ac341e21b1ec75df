"""Time and memory limits for rendering a chat template, which is a program from a model's folder."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

CHARACTERS = 10_000_000  # maximum length of a rendered chat, about 2.5 million tokens
SECONDS = 10.0  # maximum CPU time; most templates take less than a millisecond
BYTES = 2 * 1024**3  # maximum memory that all threads of the process may allocate meanwhile


@contextmanager
def rendering_limits() -> Iterator[None]:
    """Raises TimeoutError or MemoryError inside the block if a template exceeds the limits.

    The time limit applies in the main thread only and is checked between the operations of the template. The
    memory limit applies on Linux only.
    """
    limits, in_main_thread = resource.getrlimit(resource.RLIMIT_AS), _is_main_thread()
    before = None
    try:
        if in_main_thread:
            before = signal.signal(signal.SIGVTALRM, _time_is_over)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        _limit_memory(limits)
        yield
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _limit_memory(limits: tuple[int, int]) -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    most = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
    if all(limit == resource.RLIM_INFINITY or most < limit for limit in limits):
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))


def _time_is_over(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {SECONDS:.0f} s")
