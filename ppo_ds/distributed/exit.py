"""Immediate exit of this process, without the destructors of communicators."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_with_timeout(seconds: float, action: Callable[[], object]) -> None:
    """Runs ``action`` in a daemon thread and waits at most ``seconds``; for last work before an exit."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def exit_now(code: int) -> NoReturn:
    """Ends this process with the exit code ``code``.

    No destructor runs: a rank that fails alone would otherwise wait for its peers in those of its
    communicators.
    """
    # with a timeout, since the main thread may hold the locks of the streams
    run_with_timeout(1.0, lambda: (sys.stdout.flush(), sys.stderr.flush()))
    os._exit(code)
