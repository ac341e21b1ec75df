"""Starts the trainer as a user does, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "launch" / "train.py")
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": [str(BIN / "deepspeed"), "-q", "--num_gpus", "2"],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
    "python": [sys.executable],
}
TIMEOUT = 600  # a hang fails; nothing here takes a tenth of it on an idle machine


def environment() -> dict[str, str]:
    """As it is, without a GPU, a network, or what a launcher around the tests may have set."""
    mine = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return mine | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def command(launcher: str, *overrides: str) -> list[str]:
    start = LAUNCHERS[launcher]
    if launcher == "deepspeed":  # its port is always the same one otherwise
        start = [*start, "--master_port", str(free_port())]
    return [*start, TRAIN, *overrides]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(launcher: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(launcher, *overrides),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
