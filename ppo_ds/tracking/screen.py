"""Lines at the bottom of a terminal that change while other output scrolls above them.

The cursor stays visible and rests on an empty line above these lines. Three things follow:

- Nothing has to be restored, even if a signal ends the process: no cursor is hidden, and no mode of the
  terminal is changed.
- Output of other processes and of C++ libraries, which goes to the terminal directly, starts on the empty
  line. The next drawing starts below it and erases no line of it.
- After a change of the terminal's size, the lines are erased before the next drawing, however the terminal
  has wrapped them, since all of them are below the cursor.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

REFRESH_SECONDS = 0.5
# a burst of output redraws the lines no more often than this
REDRAW_SECONDS = 0.1
# Erases the line of the cursor and all below. From the first row of the screen, a plain "erase below" would
# make some terminals (tmux) keep the erased lines in their history.
ERASE = "\r\x1b[K\n\x1b[J\x1b[A"
SPINNER = "|/-\\"

Render = Callable[[int], list[str]]  # returns the lines for a number of columns


def is_terminal(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that understands control codes."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


class Screen:
    """Keeps lines below the output of this process. Does nothing if stdout is not a terminal.

    While lines are shown, ``sys.stdout`` and ``sys.stderr`` are replaced, and what is written to them appears
    above the lines. A thread draws the lines twice a second.
    """

    def __init__(self, stream: TextIO | None = None):
        """Initializes the screen on ``stream`` (default: stdout)."""
        self._stream = stream or sys.stdout
        self.is_terminal = is_terminal(self._stream)
        # what is written to it appears above the lines
        self.out: Any = _Above(self, self._stream) if self.is_terminal else self._stream
        self._lock = threading.RLock()
        self._render: Render | None = None
        self._drawn = False
        self._drawn_at = 0.0
        self._open_line = False  # the last output did not end with a line break
        self._replaced: dict[str, tuple[Any, Any]] = {}  # name in sys -> the stream before, the stream now
        self._closed = threading.Event()

    def show(self, render: Render) -> None:
        """Shows the lines that ``render`` returns, instead of the present lines. Another thread calls it."""
        if not self.is_terminal or self._closed.is_set():
            return
        with self._lock:
            first, self._render = self._render is None, render
            if first:
                self.start()
            self.draw()

    def say(self, text: str) -> None:
        """Shows what the program is doing until the next call; prints a line if stdout is not a terminal."""
        if not self.is_terminal:
            print(text, file=self._stream, flush=True)
            return
        start = time.monotonic()

        def render(columns: int) -> list[str]:
            seconds = time.monotonic() - start
            turn = SPINNER[int(seconds / REFRESH_SECONDS) % len(SPINNER)]
            return [f"{turn} {text}  {seconds:.0f} s"[:columns]]

        self.show(render)

    def start(self) -> None:
        """Replaces the streams of this process and starts the thread that draws."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                self._replaced[name] = (stream, _Above(self, stream))
                setattr(sys, name, self._replaced[name][1])
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.forget)
        threading.Thread(target=self.refresh, name="screen", daemon=True).start()

    def write(self, stream: TextIO, text: str) -> int:
        """Writes ``text`` to ``stream`` above the lines."""
        with self._lock:
            self._erase()
            written = stream.write(text)
            if text:
                self._open_line = not text.endswith("\n")
            if time.monotonic() - self._drawn_at > REDRAW_SECONDS:
                stream.flush()
                self.draw()
            return written

    def draw(self) -> None:
        """Draws the lines."""
        with self._lock:
            # a line without its end may be the progress bar of other code, or a question
            if self._render is None or self._open_line or self._closed.is_set():
                return
            columns, rows = self.size()
            lines = self._render(columns)[: max(rows - 2, 0)]
            drawing = "\r\x1b[K" + "".join(f"\r\n{line}\x1b[K" for line in lines) + "\x1b[J"
            self._stream.write(drawing + (f"\x1b[{len(lines)}A\r" if lines else ""))
            self._stream.flush()
            self._drawn, self._drawn_at = True, time.monotonic()

    def close(self) -> None:
        """Removes the lines and restores ``sys.stdout`` and ``sys.stderr``. May be called twice."""
        with self._lock:
            self._closed.set()
            self._erase()
            for name, (before, now) in self._replaced.items():
                if getattr(sys, name) is now:  # other code may have replaced it too
                    setattr(sys, name, before)
            self._replaced.clear()

    def forget(self) -> None:
        """Makes a forked child draw nothing; its copy of the lock may be held by a thread of the parent."""
        self._lock, self._render, self._drawn = threading.RLock(), None, False

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(ERASE)
            self._stream.flush()  # before other streams of the same terminal are written to
            self._drawn = False

    def size(self) -> tuple[int, int]:
        """Returns the columns and rows of the terminal. The last column stays free, since it may wrap."""
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            columns, rows = 0, 0
        return (columns or 80) - 1, rows or 24  # some pseudo-terminals have the size 0

    def refresh(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            self.draw()


class _Above:
    """Replaces a stream of this process; text appears above the lines of the screen."""

    def __init__(self, screen: Screen, stream: TextIO):
        self._screen, self._stream = screen, stream

    def write(self, text: str) -> int:
        return self._screen.write(self._stream, text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
