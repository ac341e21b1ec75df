"""Starts the trainer as a user does, in a separate process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.environment import ROOT, environment
from tests.support.ports import reserved_port

TRAIN = str(ROOT / "launch" / "train.py")
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": [str(BIN / "deepspeed"), "-q", "--num_gpus", "2"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
    "python": [sys.executable],
}
TIMEOUT = 600  # seconds until a hang fails the test; on an idle machine nothing takes a tenth of it


def command(launcher: str, *overrides: str) -> list[str]:
    start = LAUNCHERS[launcher]
    if launcher == "deepspeed":  # by default its port is always the same
        start = [*start, "--master_port", str(reserved_port())]
    return [*start, TRAIN, *overrides]


def run(command: list[str], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command; when it ends or reaches the time limit, ends all of its processes."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def launch(launcher: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(command(launcher, *overrides), cwd, environment())
