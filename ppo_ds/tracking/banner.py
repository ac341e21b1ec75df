"""Collects the start-up banner, the lines that a run prints before its first step."""

from __future__ import annotations

from collections.abc import Callable

from ppo_ds.errors import printable

WARNING = "warning"


class Banner:
    """Collects the lines of the start-up banner: the summary, then notes and warnings in order."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Initializes an empty banner; ``say`` shows which part of the start-up is running."""
        self._summary: list[str] = []
        self._notes: list[str] = []
        self._say = say

    def summarize(self, *lines: str) -> None:
        self._summary += lines

    def note(self, *lines: str) -> None:
        """Adds lines below the summary."""
        self._notes += lines

    def warn(self, text: str) -> None:
        """Adds a warning below the summary."""
        self.note(titled(WARNING, text))

    @property
    def warnings(self) -> list[str]:
        return [line[len(WARNING) :].strip() for line in self._notes if line.startswith(WARNING)]

    def starting(self, text: str) -> None:
        """Shows at once which part of the start-up begins."""
        self._say(titled("starting", printable(text)))

    def render(self) -> str:
        return "\n".join(
            printable(line) for text in (*self._summary, *self._notes) for line in text.split("\n")
        )


def titled(title: str, text: str) -> str:
    """Returns a line of the banner: ``title``, padded to the width of its column, and ``text``."""
    return f"{title:<10} {text}"
