"""Tests runs with reward=teacher: a teacher that equals the policy, and a policy that learns from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_ds.examples.sums import prepare
from tests.support.forked import Ranks

pytestmark = pytest.mark.slow

DISTILL = (
    *("+experiment=quickstart", "reward=teacher", "algo=distill", "reward.model.dtype=fp32"),
    *("+reward@eval.rewards.sums=sums", "tracker.wandb.mode=disabled"),
)


def trained(
    ranks: Ranks, count: int, folder: Path, *more: str
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Trains and returns the evaluation before the first step and the metrics of all steps."""
    codes, output = ranks.run(count, [*DISTILL, f"run.dir={folder}", *more])
    assert codes == count * [0], output
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), lines


def test_a_teacher_that_equals_the_policy_gives_no_reward(ranks: Ranks, tmp_path: Path) -> None:
    """Checks that both log-probs are of the same temperature, with a sharded teacher on two ranks."""
    summary, lines = trained(
        ranks,
        2,
        tmp_path / "run",
        f"reward.model.path={tmp_path}/run/start/model",
        *("sampling.temperature=0.7", "reward.zero.stage=3", "run.steps=4", "rollout.prompts_per_step=16"),
        *("memory.score_tokens=40", "eval.max_prompts=8", "prepare.target_accuracy=0.05"),
    )
    assert abs(summary["heldout_score_mean_before"]) < 1e-4
    for name in ("reward/score_min", "reward/score_max"):
        assert abs(lines[0][name]) < 1e-3 < abs(lines[3][name])


@pytest.mark.nightly
def test_the_accuracy_of_a_policy_rises_by_a_teacher_alone(ranks: Ranks, tmp_path: Path) -> None:
    prepare(str(tmp_path / "teacher"), seed=0, target_accuracy=0.85, max_steps=4000)
    _, lines = trained(
        ranks,
        1,
        tmp_path / "run",
        f"reward.model.path={tmp_path}/teacher/model",
        *("run.steps=40", "algo.minibatch_size=128", "eval.every=40", "run.seed=1"),
    )
    assert lines[-1]["eval/sums_mean"] > 0.57  # from 0.47
