"""Shows a chat: one answer as it grows, or two side by side on a terminal, and lines of notes.

Answers and messages are text of others: control characters and bidirectional controls are shown as escapes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ppo_ds.errors import printable
from ppo_ds.tracking.screen import open_console

NARROW = 60  # terminals with fewer columns show two answers one below the other
JOINERS = "\u200c\u200d"  # Persian and emoji need them
REFRESHES_PER_SECOND = 8


def displayable(text: str) -> str:
    """Returns text of several lines with escapes for characters that could control a terminal."""
    return "".join(c if _is_harmless(c) else printable(c) for c in text)


def _is_harmless(c: str) -> bool:
    return c.isprintable() or c in "\n\t" or c in JOINERS or unicodedata.category(c) == "Zs"


class Column:
    """The place of one answer; the base class writes it as it grows."""

    def __init__(self, console: Console, name: str | None):
        """Initializes the column; ``name`` is shown above the answer unless it is None."""
        self._console = console
        self._name = name
        self._at_line_start = True

    def write(self, piece: str) -> None:
        """Appends a piece of the answer."""
        if not piece:
            return
        if self._name is not None:
            self._console.print(Text(displayable(self._name), style="bold cyan"), soft_wrap=True)
            self._name = None
        self._console.file.write(displayable(piece))
        self._console.file.flush()
        self._at_line_start = piece.endswith("\n")

    def end(self, summary: str) -> None:
        """Ends the answer with a line about it."""
        self.write("" if self._at_line_start and self._name is None else "\n")
        self._console.print(Text(displayable(summary), style="dim"), soft_wrap=True)


class SideBySide:
    """Two or more answers next to each other on a terminal, each in a column of its own."""

    def __init__(self, console: Console, names: Sequence[str]):
        self._console, self._names = console, names
        self._texts = ["" for _ in names]
        self._summaries = ["" for _ in names]
        self._live = Live(
            console=console, transient=True, auto_refresh=True, refresh_per_second=REFRESHES_PER_SECOND
        )

    def columns(self) -> list[_Half]:
        return [_Half(self, i) for i in range(len(self._names))]

    def write(self, i: int, piece: str) -> None:
        self._texts[i] += displayable(piece)
        self._live.update(self._table(rows=max(self._console.height - 5, 4)))

    def end(self, i: int, summary: str) -> None:
        self._summaries[i] = displayable(summary)
        self.write(i, "")

    def __enter__(self) -> SideBySide:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Replaces the live view, which shows only the last lines, by the whole answers."""
        self._live.stop()
        self._console.print(self._table(rows=None))

    def _table(self, rows: int | None) -> Table:
        """Returns the table of the answers with their last ``rows`` lines (None: all)."""
        table = Table(box=SIMPLE_HEAD, expand=True, padding=(0, 1))
        for name in self._names:
            table.add_column(Text(displayable(name)), ratio=1, overflow="fold")
        width = max(self._console.width // len(self._names) - 4, 10)
        cells = []
        for text in self._texts:
            lines = Text(text).wrap(self._console, width)
            cells.append(Text("\n").join(lines if rows is None else lines[-rows:]))
        table.add_row(*cells)
        if any(self._summaries):
            table.add_row(*(Text(summary, style="dim") for summary in self._summaries))
        return table


class _Half:
    """One column of SideBySide."""

    def __init__(self, both: SideBySide, i: int):
        self._both, self._i = both, i

    def write(self, piece: str) -> None:
        self._both.write(self._i, piece)

    def end(self, summary: str) -> None:
        self._both.end(self._i, summary)


class ChatView:
    """Writes a chat to ``stream`` (default: stdout), with colours and columns only on a terminal."""

    def __init__(self, stream: TextIO | None = None):
        self._console = open_console(stream)

    def note(self, text: str) -> None:
        """Shows lines that are not part of the conversation."""
        self._console.print(Text(displayable(text), style="yellow"), soft_wrap=True)

    @contextmanager
    def answers(self, names: Sequence[str]) -> Iterator[Sequence[Column | _Half]]:
        """Yields a column for the answer of each model."""
        console = self._console
        if len(names) > 1 and console.is_terminal and console.width >= NARROW:
            with SideBySide(console, names) as both:
                yield both.columns()
        else:
            yield [Column(console, name if len(names) > 1 else None) for name in names]
        console.file.flush()
