"""Tests how errors that end a run are printed."""

import errno
import os

import pytest
from safetensors import SafetensorError

from launch.process import report
from ppo_ds.distributed.watchdog import Watchdog

TEXT = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Keeps the handler of SIGINT, which ``report`` resets."""
    monkeypatch.setattr("launch.process.signal.signal", lambda number, handler: None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/b"), "No space left on device"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "Disk quota exceeded"),
        (SafetensorError(TEXT), "No space left on device"),
    ],
)
def test_a_full_disk_is_one_line_that_names_the_run_directory(error, said, capsys):
    assert report(error, Watchdog(), None, "outputs/x") == 1
    line = f"error: run.dir=outputs/x: {said}: free some space and repeat the command\n"
    assert capsys.readouterr().err == line


def test_another_error_of_the_system_is_printed_as_it_is(capsys):
    assert report(OSError(errno.EIO, os.strerror(errno.EIO)), Watchdog(), None, "outputs/x") == 1
    assert capsys.readouterr().err.rstrip() == "OSError: [Errno 5] Input/output error"
