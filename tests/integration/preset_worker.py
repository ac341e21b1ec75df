"""Runs short trainings one after the other in one process group.

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
from ppo_ds.run import final_report

HANG = 200  # seconds after which a hanging case prints its stacks and exits


def main() -> None:
    final_report.plot_curves = lambda *_, **__: False  # a plot takes a second, and no test reads it
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        faulthandler.dump_traceback_later(HANG, exit=True)
        if os.environ["RANK"] == "0":
            print("==", name, flush=True)
        run = build_run(load_config(arguments))
        assert run.fit() == "done"
        if os.environ["RANK"] == "0":
            print("optimizer steps:", run.stage.models["actor"].engine.global_steps, flush=True)
        for model in run.stage.models.values():
            if model is not None:
                model.engine.destroy()
        del run
        gc.collect()
        faulthandler.cancel_dump_traceback_later()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
