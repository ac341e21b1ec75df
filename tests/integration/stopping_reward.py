"""Scores responses; in the third step of a first start, signals Slurm's batch script to stop the run.

The first call is the one before models are loaded.
"""

import os
import signal
import time
from pathlib import Path

FOLDER = Path(os.environ["STUBS_FOLDER"])
calls = 0


def score(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "0" and not (FOLDER / "asked").exists():
        (FOLDER / "asked").touch()
        os.kill(int((FOLDER / "batch").read_text()), signal.SIGUSR1)
        wait_until_forwarded(time.monotonic() + 300)
    return [float(sum(map(int, filter(str.isdigit, response)))) for response in responses]


def wait_until_forwarded(deadline):
    while not (FOLDER / "forwarded").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
