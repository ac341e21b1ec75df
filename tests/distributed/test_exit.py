"""Tests that the exit actions run at every kind of exit except a fatal signal."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
sys.path.insert(0, {root!r})
from ppo_ds.distributed.exit import exit_now, on_exit
on_exit(lambda: os.write(1, b"released "))
on_exit(threading.Event().wait)  # an action that hangs is left after a second
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "output"),
    [
        ("exit_now(3)", 3, "released "),
        ("threading.Thread(target=exit_now, args=(4,)).start(); threading.Event().wait()", 4, "released "),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
    ids=["exit_now", "exit_now in a thread", "SIGKILL"],
)
def test_exit_actions(end, code, output, pytestconfig):
    program = PROGRAM.format(root=str(pytestconfig.rootpath), end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, output), done.stderr


def test_exit_actions_of_a_usual_exit(pytestconfig):
    program = PROGRAM.format(root=str(pytestconfig.rootpath), end="sys.exit(5)").replace(
        "on_exit(threading.Event().wait)", "#"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (5, "released "), done.stderr
