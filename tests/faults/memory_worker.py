"""Runs the cases of test_fault_memory.py whose runs go on after an out-of-memory error, on two ranks."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from ppo_ds.assemble.run import build_run
from ppo_ds.config.validation import validated
from ppo_ds.distributed import faults
from ppo_ds.run import final_report
from tests.faults.worlds_worker import config

Tree = dict[str, Any]
# case -> ZeRO stage, fault, the budget that is halved; no graphs are kept
REPEATED = {
    "generate": (3, "memory@generate.step:rank=0:at=5", "rollout_tokens"),
    "score": (2, "memory@score:rank=1", "score_tokens"),
}
GIB = 2**30


def sampled(root: Path, stage: int) -> Tree:
    """Returns the config of two steps that sample, so that a repetition depends on the random states."""
    tree = config(root, stage=stage)
    tree["run"]["steps"] = 2
    tree["sampling"]["top_k"] = 0
    tree["memory"]["reuse_forwards"] = "off"
    return tree


def train(tree: Tree, run_dir: Path, fault: str = "") -> None:
    tree["run"]["dir"] = str(run_dir)
    run = build_run(validated(tree, int(os.environ["WORLD_SIZE"])))
    # the parity check at the start generates too
    faults.visits.clear()
    os.environ["PPO_DS_FAULT"] = fault
    assert run.fit() in ("done", "stop_at_step")
    os.environ["PPO_DS_FAULT"] = ""
    for model in run.stage.models.values():
        model.engine.destroy()
    del run, model
    gc.collect()


def repeat() -> None:
    """Runs each case twice: with an out-of-memory error, and with the smaller budget from the beginning."""
    root = Path(sys.argv[1])
    final_report.plot_curves = lambda *_, **__: False  # a plot takes a second, and no test reads it
    for name, (stage, fault, key) in REPEATED.items():
        train(sampled(root, stage), root / name / "failed", fault)
        tree = sampled(root, stage)
        tree["memory"][key] //= 2
        train(tree, root / name / "small")
    tree = sampled(root, stage=2)
    tree["memory"] |= {"score_tokens": 300, "train_tokens": 300}
    train(tree, root / "kept graphs" / "off")
    tree["memory"]["reuse_forwards"] = "all"
    train(tree, root / "kept graphs" / "failed", "memory@score:rank=1")


def resume() -> None:
    """Trains with auto budgets, and resumes on a machine with another memory.

    The small machine has no memory beyond that of the libraries, so that its forwards have one row each.
    """
    root, memory = Path(sys.argv[1]), psutil.virtual_memory()
    final_report.plot_curves = lambda *_, **__: False

    def machine(gib: int) -> None:
        psutil.virtual_memory = lambda: SimpleNamespace(total=gib * GIB, available=memory.available)

    def tree(**run: Any) -> Tree:
        made = config(root, stage=2)
        made["memory"] = {}
        made["run"] |= {"resume": "auto"} | run
        return made

    machine(1)
    train(tree(), root / "auto" / "small")
    machine(64)
    train(tree(), root / "auto" / "large")
    machine(1)
    train(tree(stop_at_step=2), root / "auto" / "moved")
    machine(64)
    train(tree(), root / "auto" / "moved")
