"""Process-wide heartbeat: the phase that this rank is in and the number of pieces of work it has completed.

The watchdog (distributed/watchdog.py) reads it to tell slow work from a hang. There is one heartbeat per
process, like the global random state, so that code deep in a rollout can call ``beat`` without receiving an
object. Only ``beat`` and ``enter`` change it, and only the main thread calls them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Heartbeat:
    """State of the heartbeat at one moment."""

    phase: str = "before the first phase"  # continues the sentence "this rank is ..."
    since: float = 0.0  # time.time() when the phase was entered
    beats: int = 0


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
    _current = Heartbeat(phase, time.time() if since is None else since, previous.beats + 1)
    return previous.phase, previous.since
