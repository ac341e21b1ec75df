"""Runs PPO trainings one after the other in one process group, which may stop before their last step.

CASES.json maps each name to the arguments of launch/train.py. Each run writes to its run.dir.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from pathlib import Path

import torch

from launch.cli import load_config
from ppo_ds.assemble.run import build_run

HANG = 400  # seconds after which a hanging case prints its stacks and exits


def remove_shared_memory() -> None:
    """Removes the names of the shared memory that vLLM uses for tensor parallelism on a CPU.

    They are the same in every run, and ranks that are killed leave them behind. Memory that is in use stays
    in use without its name.
    """
    for file in Path("/dev/shm").glob("-tp:*-cpushm_*"):
        file.unlink(missing_ok=True)


def main() -> None:
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        faulthandler.dump_traceback_later(HANG, exit=True)
        if os.environ["RANK"] == "0":
            print("==", name, flush=True)
        run = build_run(load_config(arguments))
        assert not list(Path("/dev/shm").glob("-tp:*-cpushm_*"))  # other runs need the names
        run.fit()
        for model in run.stage.models.values():
            if model is not None:
                model.engine.destroy()
        del run
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
    torch.distributed.barrier()
