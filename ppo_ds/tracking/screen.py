"""Controls the terminal of a run: scrolling output above changing lines at the bottom."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live

REFRESHES_PER_SECOND = 2


def open_console(stream: TextIO | None = None) -> Console:
    """Opens a rich console on ``stream`` (default: stdout); without a terminal, plain text of 120 columns."""
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a response in Chinese must not end a run whose log is ASCII
    terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        emoji=False,
        force_terminal=terminal,
        no_color=not terminal,
        width=None if terminal else 120,
    )


class Screen:
    """Shows changing lines below the output of this process, but only if stdout is a terminal."""

    def __init__(self, stream: TextIO | None = None):
        self.console = open_console(stream)
        self._render: Callable[[], RenderableType] = lambda: ""
        self._live: Live | None = None
        self._closed = False

    def show(self, render: Callable[[], RenderableType]) -> None:
        """Replaces the lines by the output of ``render``, which another thread calls repeatedly."""
        if not self.console.is_terminal or self.console.is_dumb_terminal or self._closed:
            return
        self._render = render
        if self._live is None:
            self._live = Live(
                get_renderable=lambda: self._render(),
                console=self.console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            self.console.show_cursor()  # a process that a signal ends could not show the cursor again
            os.register_at_fork(after_in_child=restore_streams)
        self._live.refresh()

    def say(self, text: str) -> None:
        """Shows ``text`` until the next call; prints it as a line if stdout is not a terminal."""
        start = time.monotonic()
        self.show(lambda: f"{text}  {time.monotonic() - start:.0f} s")
        if self._live is None:
            print(text, file=self.console.file, flush=True)

    def close(self) -> None:
        """Removes the lines and restores ``sys.stdout`` and ``sys.stderr``. May be called twice."""
        self._closed = True
        if self._live is not None:
            self._live.stop()


def restore_streams() -> None:
    """Restores the streams in a forked process, because a parent's thread may hold the lock of the view."""
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
