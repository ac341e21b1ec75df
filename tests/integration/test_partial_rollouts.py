"""Tests whole runs with partial rollouts on two ranks: a resumed run, and one that continues on one rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.test_multi_turn import numbers
from tests.support.forked import Ranks

pytestmark = pytest.mark.slow

SMALL = (
    *("+experiment=quickstart", "run.steps=4", "eval.every=2", "prepare.target_accuracy=0.05"),
    *("rollout.backend=static", "rollout.partial=true", "algo.rollout_is.kind=truncate"),
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=2", "algo.minibatch_size=8"),
    *("actor.zero.stage=3", "critic.zero.stage=3", "actor.zero.generation_gather=layers"),
    *(
        f"+{role}.deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
        for role in ("actor", "critic")
    ),
    "tracker.samples=-1",
)


def trained(ranks: Ranks, folder: Path, *more: str, count: int = 1) -> Path:
    codes, output = ranks.run(count, [*SMALL, f"run.dir={folder}", *more])
    assert codes == count * [0], output
    return folder


def carried_by(folder: Path, step: int) -> dict[str, list]:
    file = folder / "checkpoints" / f"step_{step:06d}" / "state.safetensors"
    return {name.removeprefix("partial."): tensor.tolist() for name, tensor in load_file(file).items()}


def test_a_resumed_run_continues_the_carried_responses(ranks: Ranks, tmp_path: Path) -> None:
    whole = trained(ranks, tmp_path / "whole", count=2)
    parts = trained(ranks, tmp_path / "parts", "run.stop_at_step=2", count=2)
    carried = carried_by(parts, 2)
    assert len(carried["prompts"]) == 8 and any(carried["lengths"])
    fewer = tmp_path / "fewer"
    shutil.copytree(parts, fewer)
    trained(ranks, parts, count=2)
    assert numbers(parts) == numbers(whole)
    assert carried_by(parts, 4) == carried_by(whole, 4)
    for step in (3, 4):
        samples = Path("samples") / f"step_{step:06d}.jsonl"
        assert (parts / samples).read_text() == (whole / samples).read_text()
    steps = [line for line in numbers(whole) if "rollout/versions_max" in line]
    assert len(steps) == 4 and steps[0]["rollout/stale_token_frac"] == 0
    assert max(line["rollout/versions_max"] for line in steps) > 1
    # log-probs of the current version are those of training
    assert all(line["parity/logp_abs_diff_max"] < 1e-4 for line in steps)

    trained(ranks, fewer)  # on one rank
    rows = [json.loads(line) for line in (fewer / "samples" / "step_000003.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and numbers(fewer)[: len(numbers(fewer)) // 2]
    left = carried_by(fewer, 4)["prompts"]
    assert len(left) == 8 and set(carried["prompts"]) - set(left)
