"""Runs the ranks of test_fault_parity.py: PPO with a decode backend whose copy leaves one layer out."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ppo_ds.assemble.run import build_run
from ppo_ds.config.validation import validated
from ppo_ds.rollout.keys import RolloutConfig
from ppo_ds.run import final_report
from tests.faults.worlds_worker import config
from tests.rollout.plain_backend import PlainGenerator

LEFT_OUT = ".layers.1."
STEPS = 3
Tree = dict[str, Any]

# Case -> ZeRO stage, keys of algo. The old log-probs are those of the update's forward, and of the backend.
CASES: dict[str, tuple[int, Tree]] = {
    "update": (3, {"kl": {"place": "loss", "estimator": "k2"}}),
    "rollout": (2, {"old_logprobs": "rollout", "epochs": 2}),
}


class CopyingGenerator(PlainGenerator):
    """Decodes with a copy of the model, which each call fills with the current weights."""

    left_out: str | None = None

    def __init__(self, lm: Callable[[], nn.Module], **arguments: Any):
        super().__init__(self.filled, **arguments)
        self.source, self.copy = lm, None

    @torch.no_grad()
    def filled(self) -> nn.Module:
        source, first = self.source(), self.copy is None
        if first:
            with torch.random.fork_rng():
                self.copy = AutoModelForCausalLM.from_config(source.config).eval()
        for (name, weight), current in zip(self.copy.named_parameters(), source.parameters(), strict=True):
            if first or self.left_out is None or self.left_out not in name:
                weight.copy_(current)
        return self.copy


class StaleGenerator(CopyingGenerator):
    """Fills one layer in its first call only."""

    left_out = LEFT_OUT


def train(root: Path, case: str, run_dir: Path, backend: str) -> str:
    """Trains, or continues the run in ``run_dir``, and returns why the run ended."""
    stage, algo = CASES[case]
    tree = config(root, stage=stage)
    tree["run"] |= {"steps": STEPS, "dir": str(run_dir), "resume": "auto"}
    for role in ("actor", "critic"):
        tree[role]["optim"] = {"lr": 1e-2}
    tree["algo"] |= algo
    tree["checkpoint"] = {"every": None, "minutes": None}
    tree["rollout"]["backend"] = backend
    run = build_run(validated(tree, int(os.environ["WORLD_SIZE"])))
    reason = run.fit()
    for model in run.stage.models.values():
        model.engine.destroy()
    del run, model
    gc.collect()
    return reason


def main() -> None:
    root = Path(sys.argv[1])

    class Copying(RolloutConfig):
        """Decodes with a copy."""

        backend: Literal["copying"] = "copying"
        generator = f"{__name__}.CopyingGenerator"

    class Stale(RolloutConfig):
        """Decodes with a copy of which a layer is left out."""

        backend: Literal["stale"] = "stale"
        generator = f"{__name__}.StaleGenerator"

    final_report.plot_curves = lambda *_, **__: False  # a plot takes a second, and no test reads it
    for case in CASES:
        assert train(root, case, root / case / "stale", "stale") == "max_parity"
    assert train(root, "rollout", root / "rollout" / "stale", "copying") == "done"  # continues the run
    assert train(root, "rollout", root / "rollout" / "whole", "copying") == "done"
