"""Tests a whole run with data.difficulty: its metrics, and that it continues exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.test_multi_turn import numbers
from tests.support.forked import Ranks

pytestmark = pytest.mark.slow

SMALL = (
    *("+experiment=quickstart", "run.steps=4", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=2"),
    *("algo.minibatch_size=8", "algo.advantage.estimator=grpo", "algo.dynamic_sampling.enabled=true"),
    *("algo.dynamic_sampling.max_rounds=2", "data.difficulty.floor=0.1", "data.difficulty.responses=2"),
    *("data.max_samples=24", "eval.every=2", "eval.max_prompts=8", "prepare.target_accuracy=0.05"),
    *("tracker.samples=-1", "tracker.wandb.mode=disabled"),
)


def trained(ranks: Ranks, folder: Path, *more: str) -> Path:
    codes, output = ranks.run(1, [*SMALL, f"run.dir={folder}", *more])
    assert codes == [0], output
    return folder


def remembered(folder: Path, step: int) -> dict[str, Any]:
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    tensors = {name: tensor.tolist() for name, tensor in load_file(checkpoint / "state.safetensors").items()}
    return json.loads((checkpoint / "state.json").read_text())["state"]["difficulty"] | tensors


def test_a_resumed_run_draws_the_same_prompts(ranks: Ranks, tmp_path: Path) -> None:
    whole = trained(ranks, tmp_path / "whole")
    trained(ranks, tmp_path / "parts", "run.stop_at_step=2")
    parts = trained(ranks, tmp_path / "parts")
    assert numbers(parts) == numbers(whole) and remembered(parts, 4) == remembered(whole, 4)
    settled = [line["rollout/settled_frac"] for line in numbers(whole) if "rollout/rounds" in line]
    assert len(settled) == 4 and settled[0] < settled[3]
    assert remembered(whole, 4)["observed"] >= 4
