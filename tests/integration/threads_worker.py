"""Connects to the other ranks like launch/train.py, and reports the threads that torch uses.

test_threads.py starts it under each launcher.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.process import prepare_environment

# Simulates eight cores: with two, a launcher's default of one thread would be correct by chance.
os.sched_getaffinity = lambda pid: set(range(8))
prepare_environment(verbose=False)

import torch

from ppo_ds.distributed.world import connect

world = connect(timeout_minutes=5, threads=int(os.environ["ASKED"]) if "ASKED" in os.environ else None)
found = {
    "torch": torch.get_num_threads(),
    "children": os.environ["OMP_NUM_THREADS"],
    "cores": world.threads.cores,
    "ranks": world.threads.ranks,
    "waits": world.threads.waits,
}
Path(os.environ["FOUND"], f"{world.rank}.json").write_text(json.dumps(found))
world.close()
