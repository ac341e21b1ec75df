"""Starts processes of tests, and provides their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SET_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without a GPU, access to the Hub or the variables of launchers."""
    inherited = {key: value for key, value in os.environ.items() if key not in SET_BY_LAUNCHERS}
    return inherited | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def run_python(*arguments: str, cwd: Path = ROOT, minutes: float = 15) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; a test that hangs fails after ``minutes``."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60 * minutes,
    )
