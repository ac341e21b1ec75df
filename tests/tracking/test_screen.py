"""Tests the lines below the output of a terminal, as a simulated terminal shows them."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TextIO, cast

import pytest

from ppo_ds.tracking.screen import Screen

CODES = re.compile(r"\x1b\[(\d*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """A terminal of some columns that understands the control codes of Screen, and no others."""

    def __init__(self, columns: int = 80):
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no descriptor")  # Screen then assumes 80 columns

    def flush(self) -> None:
        """Does nothing."""

    def write(self, text: str) -> int:
        for code in CODES.finditer(text):
            self.apply(code.group(), int(code.group(1) or 1) if code.group(2) else 0, code.group(2))
        return len(text)

    def apply(self, text: str, number: int, kind: str | None) -> None:
        line = self.lines[self.row]
        if text == "\n":
            self.row += 1
            self.lines += [""] * (self.row + 1 - len(self.lines))
            self.column = 0  # a terminal driver turns a line feed into both
        elif text == "\r":
            self.column = 0
        elif kind == "A":
            self.row -= number
        elif kind == "K":
            self.lines[self.row] = line[: self.column]
        elif kind == "J":
            self.lines[self.row :] = [line[: self.column]]
        else:
            assert kind is None, text
            line = line.ljust(self.column)
            self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
            self.column += len(text)

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for line in self.lines]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Screen, Terminal]]]:
    """Replaces stdout and stderr by a terminal, on which a screen draws only when the test asks for it.

    A test calls this at its beginning: pytest replaces the streams between a fixture and its test.
    """
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Screen, "refresh", lambda self: None)
    monkeypatch.setattr("ppo_ds.tracking.screen.REDRAW_SECONDS", -1.0)
    with ExitStack() as stack:

        def open_screen() -> tuple[Screen, Terminal]:
            terminal = Terminal()
            stack.enter_context(redirect_stdout(cast(TextIO, terminal)))
            stack.enter_context(redirect_stderr(cast(TextIO, terminal)))
            screen = Screen()
            stack.callback(screen.close)
            return screen, terminal

        yield open_screen


def test_output_appears_above_the_lines(opened) -> None:
    screen, terminal = opened()
    screen.show(lambda columns: ["bar", f"{columns} columns"])
    assert terminal.text == ["", "bar", "79 columns"] and (terminal.row, terminal.column) == (0, 0)
    print("one\ntwo", file=sys.stderr)
    print("three")
    assert terminal.text == ["one", "two", "three", "", "bar", "79 columns"] and terminal.row == 3
    screen.show(lambda columns: ["shorter"])
    assert terminal.text == ["one", "two", "three", "", "shorter"]
    screen.close()
    print("after")
    assert terminal.text == ["one", "two", "three", "after", ""]
    assert sys.stdout is terminal and sys.stderr is terminal


def test_output_of_other_processes_is_kept(opened) -> None:
    screen, terminal = opened()
    screen.show(lambda columns: ["bar", "metrics"])
    terminal.write("a line of another rank\nand one more\n")
    screen.draw()
    assert terminal.text[0] == "a line of another rank" and terminal.text[1].startswith("and one more")
    assert terminal.text[2:] == ["", "bar", "metrics"]


def test_lines_that_a_narrower_terminal_has_wrapped_are_erased(opened) -> None:
    screen, terminal = opened()
    screen.show(lambda columns: ["a long line"])
    terminal.lines[1:] = ["a long", "line"]
    screen.draw()
    assert terminal.text == ["", "a long line"]


def test_no_line_is_drawn_over_the_progress_bar_of_other_code(opened) -> None:
    screen, terminal = opened()
    screen.show(lambda columns: ["bar"])
    print("\r 50 %", end="", file=sys.stderr)
    screen.draw()
    assert terminal.text[0] == " 50 %" and "bar" not in terminal.text
    print("\r100 %", file=sys.stderr)
    assert terminal.text == ["100 %", "", "bar"]


def test_the_start_up_is_shown(opened) -> None:
    screen, terminal = opened()
    screen.say("reading data")
    assert terminal.text == ["", "| reading data  0 s"]
    screen.say("loading")
    assert terminal.text == ["", "| loading  0 s"]


def test_without_a_terminal_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.say("reading data")
    screen.show(lambda columns: ["bar"])
    screen.close()
    assert capsys.readouterr().out == "reading data\n" and screen.out is sys.stdout


def test_a_dumb_terminal_gets_no_control_codes(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen, terminal = opened()
    screen.say("reading data")
    assert terminal.text == ["reading data", ""]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("1 / 0", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_however_a_process_ends_the_terminal_needs_no_repair(end: str, code: int) -> None:
    """No control code changes a mode of the terminal or hides its cursor, so none has to be taken back."""
    script = f"""
        import os, signal, sys
        from ppo_ds.distributed import heartbeat
        from ppo_ds.tracking.console import ConsoleTracker
        tracker = ConsoleTracker("sft", 4, activity=heartbeat.read)
        tracker.start({{}})
        tracker.log(1, {{"sft/loss": 1.0}})
        print("a stray line", flush=True)
        tracker.screen.draw()
        {end}
    """
    mine, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "TERM": "xterm-256color"}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(mine, 65536):
            shown += chunk
    except OSError:
        pass  # Linux ends a pseudo-terminal with an input/output error
    os.close(mine)
    assert child.wait(60) == code
    assert b"sft" in shown and "━".encode() in shown and b"1/4" in shown and b"a stray line" in shown
    codes = set(re.findall(rb"\x1b\[[0-9;?]*([A-Za-z])", shown)) | set(re.findall(rb"\x1b([^\[])", shown))
    assert codes <= {b"A", b"J", b"K", b"m"}
