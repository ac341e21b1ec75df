"""Signs of life of this process: what its loop is doing, and that it gets on. The thread that tells work from a hang reads them (distributed/watchdog.py).

Kept for the process as a whole, like its random state: whatever gets on says so in one line, without being handed anything.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn


@dataclass
class Heartbeat:
    place: str = "before the first phase"
    since: float = field(default_factory=time.time)
    signs: int = 0


HEARTBEAT = Heartbeat()


def sign() -> None:
    """A piece of work is done: a micro-batch, some tokens of the answers."""
    HEARTBEAT.signs += 1


def enter(place: str, since: float | None = None) -> tuple[str, float]:
    """A phase begins or ends, which is a sign of life too. Returns where this was before and since when, to be entered again."""
    before = HEARTBEAT.place, HEARTBEAT.since
    HEARTBEAT.place, HEARTBEAT.since = place, time.time() if since is None else since
    sign()
    return before


def within(seconds: float, action: Callable[[], object]) -> None:
    """Does it as far as that goes in so many seconds: for the last things before the end of this process."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def exit_now(code: int) -> NoReturn:
    """Ends this process at once: a rank that fails alone must not wait for the others in the destructors of its communicators."""
    within(1.0, lambda: (sys.stdout.flush(), sys.stderr.flush()))  # the main thread may hold their locks
    os._exit(code)
