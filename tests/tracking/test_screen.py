"""Tests the lines below the output of a terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from ppo_ds.tracking.screen import Screen


def test_without_a_terminal_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.say("reading data")
    screen.show(lambda: "bar")
    screen.close()
    assert capsys.readouterr().out == "reading data\n"


def on_terminal(script: str, term: str = "xterm-256color", **streams: int) -> tuple[int, str]:
    """Runs a script on a terminal; returns its exit code and the output with its control codes."""
    mine, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "TERM": term}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs} | streams
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=env, **streams)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(mine, 65536):
            shown += chunk
    except OSError:
        pass  # Linux ends a pseudo-terminal with an input/output error
    os.close(mine)
    return child.wait(60), shown.decode()


SCREEN = """
    import os, sys
    from ppo_ds.tracking.screen import Screen
    screen = Screen()
    screen.say("reading data")
    print("one")
    print("two", file=sys.stderr)
"""


def test_output_appears_above_the_lines_which_are_removed_at_the_end() -> None:
    code, shown = on_terminal(SCREEN + "    screen.close(); screen.close(); print('after')")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)
    assert code == 0 and plain.index("reading data  0 s") < plain.index("one") < plain.index("two")
    assert shown.rstrip().endswith("after") and "\x1b[2K" in shown


def test_a_dumb_terminal_gets_no_control_codes() -> None:
    code, shown = on_terminal(SCREEN, term="dumb")
    assert code == 0 and shown.split("\r\n") == ["reading data", "one", "two", ""]


def test_errors_in_a_file_do_not_go_to_the_terminal(tmp_path) -> None:
    with open(tmp_path / "errors", "wb") as errors:
        code, shown = on_terminal(SCREEN + "    screen.close()", stderr=errors.fileno())
    assert code == 0 and "two" not in shown and (tmp_path / "errors").read_text() == "two\n"


def test_a_forked_process_prints_although_a_thread_was_drawing() -> None:
    code, shown = on_terminal(
        SCREEN
        + """
    with screen.console._lock:
        if os.fork() == 0:
            print("from the child", flush=True)
            os._exit(0)
        os.wait()
    screen.close()
    """
    )
    assert code == 0 and "from the child" in shown


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("1 / 0", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_however_a_process_ends_the_cursor_stays_visible(end: str, code: int) -> None:
    script = f"""
        import os, signal, sys
        from ppo_ds.distributed import heartbeat
        from ppo_ds.tracking.console import ConsoleTracker
        tracker = ConsoleTracker("sft", 4, activity=heartbeat.read)
        tracker.start({{}})
        tracker.log(1, {{"sft/loss": 1.0}})
        print("a stray line", flush=True)
        {end}
    """
    ended, shown = on_terminal(script)
    assert ended == code
    assert "sft" in shown and "━" in shown and "1/4" in shown and "a stray line" in shown
    hidden, visible = shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h")
    assert visible > hidden
