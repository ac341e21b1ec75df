"""Process-wide heartbeat: this rank's current phase and its number of completed pieces of work.

The watchdog (distributed/watchdog.py) reads it to tell slow work from a hang, and the console shows it on a
terminal. There is one heartbeat per process, like the global random state, so that code deep in a rollout can
call ``beat`` without receiving an object. Only the functions of this module change it, and only the main
thread may call them, except ``read``. They never wait for a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Work:
    """Countable work, such as the responses of a rollout."""

    done: int
    total: int
    unit: str  # plural, such as "responses"


@dataclass(frozen=True)
class Heartbeat:
    """State of the heartbeat at one moment."""

    phase: str = "before the first phase"  # continues the sentence "this rank is ..."
    since: float = 0.0  # time.time() when the phase was entered
    beats: int = 0
    work: tuple[Work, ...] = ()  # each entry is a part of one unit of the entry before


_current = Heartbeat(since=time.time())


def read() -> Heartbeat:
    """Returns the current state; any thread may call it."""
    return _current


def beat() -> None:
    """Counts one completed piece of work, such as a micro-batch or some generated tokens."""
    global _current
    _current = replace(_current, beats=_current.beats + 1)


def enter(phase: str, since: float | None = None) -> tuple[str, float]:
    """Enters a phase, which counts as a beat.

    Returns the previous phase and its start time; ``enter(*previous)`` returns to that phase.
    """
    global _current
    previous = _current
    since = time.time() if since is None else since
    _current = replace(previous, phase=phase, since=since, beats=previous.beats + 1)
    return previous.phase, previous.since


@contextmanager
def counting(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to report how many of ``total`` units are done.

    Blocks may be nested: a nested block counts the parts of one unit of the enclosing block.
    """
    global _current
    outer = _current.work

    def done(count: int) -> None:
        global _current
        _current = replace(_current, work=(*outer, Work(count, total, unit)))

    done(0)
    try:
        yield done
    finally:
        _current = replace(_current, work=outer)
