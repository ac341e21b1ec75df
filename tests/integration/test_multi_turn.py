"""Tests whole runs with an environment: learning data, metrics, samples, and a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked import Ranks

pytestmark = pytest.mark.slow

SMALL = (
    "+experiment=calculator",
    *("run.steps=4", "rollout.prompts_per_step=16", "algo.minibatch_size=8", "eval.every=2"),
    *("prepare.digits=1", "prepare.problems=81", "prepare.heldout=10", "prepare.validation=20"),
    *("prepare.calls=1", "prepare.target_accuracy=0.05", "prepare.learning_rate=0.01"),
    *("prepare.hidden_size=32", "prepare.heads=2", "prepare.batch_size=51"),
    *("tracker.samples=-1", "tracker.wandb.mode=disabled"),
)


def trained(ranks: Ranks, folder: Path, *more: str, count: int = 1) -> Path:
    """Runs the experiment in ``folder`` on ``count`` ranks, starting or continuing it; returns ``folder``."""
    codes, output = ranks.run(count, [*SMALL, f"run.dir={folder}", *more])
    assert codes == count * [0], output
    return folder


def numbers(folder: Path) -> list[dict[str, float]]:
    """Returns the metrics of each step that do not depend on the speed of the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speed = ("time", "perf/", "mem/", "health/rank_time", "wall")
    return [{k: v for k, v in line.items() if not k.startswith(speed)} for line in lines]


def test_a_resumed_run_draws_the_same_turns(ranks: Ranks, tmp_path: Path) -> None:
    whole = trained(ranks, tmp_path / "whole")
    trained(ranks, tmp_path / "parts", "run.stop_at_step=2")
    parts = trained(ranks, tmp_path / "parts")
    assert numbers(parts) == numbers(whole)
    assert (parts / "samples" / "step_000004.jsonl").read_text() == (
        whole / "samples" / "step_000004.jsonl"
    ).read_text()
    steps = [line for line in numbers(whole) if "rollout/turns_mean" in line]
    assert len(steps) == 4 and any(line["rollout/turns_mean"] > 1 for line in steps)
    assert all(line["parity/logp_abs_diff_max"] < 1e-4 for line in steps)
    for line in steps:
        ended = [value for name, value in line.items() if name.startswith("rollout/ended_")]
        assert len(ended) == 5 and sum(ended) == pytest.approx(1)
    rows = [json.loads(line) for line in (whole / "samples" / "step_000004.jsonl").read_text().splitlines()]
    assert any([turn["by"] for turn in row["turns"]][:2] == ["policy", "environment"] for row in rows)


SLOW = """
import asyncio, os
from ppo_ds.examples.calculator import Calculator

class Slow(Calculator):
    resets = 0

    async def reset(self, row):
        super().reset(row)
        Slow.resets += 1
        self.is_slow = os.environ["RANK"] == "0" and Slow.resets % 8 == 1

    async def step(self, answer):
        await asyncio.sleep(1.5 * self.is_slow)  # so long that all other rows of both ranks have ended
        return super().step(answer)
"""


def test_two_ranks_with_zero_3_whose_rows_do_not_wait_for_one_another(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 generates fillers while rank 0 has a slow row; a resumed run draws the same tokens."""
    (tmp_path / "slow.py").write_text(SLOW)
    settings = (
        *("zero=stage3", f"rollout.environment.path={tmp_path}/slow.py:Slow", "eval.every=null"),
        "+actor.deepspeed.zero_optimization.stage3_param_persistence_threshold=0",
    )
    whole = trained(ranks, tmp_path / "whole", *settings, count=2)
    trained(ranks, tmp_path / "parts", *settings, "run.stop_at_step=2", count=2)
    parts = trained(ranks, tmp_path / "parts", *settings, count=2)
    expected, found = (
        [json.loads(line) for line in (folder / "samples" / "step_000004.jsonl").read_text().splitlines()]
        for folder in (whole, parts)
    )
    assert [row["turns"] for row in found] == [row["turns"] for row in expected] and len(expected) == 16
    assert {len(row["turns"]) for row in expected} > {1}
    for before, after in zip(numbers(whole), numbers(parts), strict=True):
        # a run that stops evaluates once more
        after = {
            name: value for name, value in after.items() if not name.startswith("eval/") or name in before
        }
        assert after == pytest.approx(before, rel=1e-3, abs=1e-5, nan_ok=True)
        assert before.get("parity/logp_abs_diff_max", 0.0) < 1e-4
