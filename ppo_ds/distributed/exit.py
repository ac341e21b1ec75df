"""Immediate exit of this process, without the destructors of communicators."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


def run_with_timeout(seconds: float, action: Callable[[], object]) -> None:
    """Runs ``action`` in a daemon thread and waits at most ``seconds`` for it. For use before an exit."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


_actions: list[Callable[[], None]] = []


def on_exit(action: Callable[[], None]) -> None:
    """Registers a quick ``action`` to run before this process ends, by ``exit_now`` or normally.

    The action does not run when a signal ends the process. It may run twice, and in any thread.
    """
    _actions.append(action)
    atexit.register(action)


def run_exit_actions() -> None:
    """Runs the actions of ``on_exit``, each for at most a second."""
    for action in _actions:
        run_with_timeout(1.0, action)


def exit_now(code: int) -> NoReturn:
    """Ends this process with the exit code ``code``.

    No destructor runs: the destructors of communicators would make a failed rank wait for the other ranks.
    """
    # with a timeout, since the main thread may hold the locks of the streams
    run_with_timeout(1.0, lambda: (sys.stdout.flush(), sys.stderr.flush()))
    run_exit_actions()
    os._exit(code)
