"""A worker script of these tests, run once for many cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def work(worker: Path, root: Path, patience: float) -> None:
    """``worker`` with the one argument ``root``, where its log stays too. Nothing that it starts outlives this; ``patience``: seconds."""
    own = {
        "PYTHONPATH": str(worker.parents[2]),
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    own |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with (root / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(worker), str(root)],
            env=os.environ | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(patience)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (root / "log").read_text()[-6000:]
