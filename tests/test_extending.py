"""Additions made as CONTRIBUTING says, a table entry and a YAML file outside the repository, take effect."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launch.cli import load_config
from ppo_ds.config.registry import (
    ADVANTAGE_ESTIMATORS,
    LOSS_AGGREGATIONS,
    POLICY_LOSSES,
    AdvantageEstimator,
    LossAggregation,
    PolicyLoss,
)
from ppo_ds.config.schema import Config
from ppo_ds.ops.losses import BatchTotals, Share, policy_loss, token_mean
from tests.ppo.conftest import ThreadWorld
from tests.ppo.preset_runs import WIDTH, Run, gradient_of, make_and_learn
from tests.ppo.test_preset_goldens import OFFERED, dialogue


def doubled_scores(scores: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Returns twice the score of each response as its advantage."""
    return 2 * scores


def tripled_loss(*args: object, **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns three times the PPO loss."""
    loss, metrics = policy_loss(*args, **settings)
    return 3 * loss, metrics


def doubled_mean(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Returns a mean of twice the loss."""
    return token_mean(2 * loss, mask, totals)


def config(folder: Path, preset: str) -> Config:
    arguments = ["--config-dir", str(folder), f"algo={preset}", "actor.model.path=org/actor"]
    arguments += ["reward=function", "reward.path=pkg.mod:score", "data.path=org/prompts", "run.steps=2"]
    arguments += ["rollout.prompts_per_step=3", "rollout.samples_per_prompt=2"]
    return load_config([*arguments, f"sampling.max_new_tokens={WIDTH}"])


def run(folder: Path, preset: str) -> Run:
    numbers = replace(dialogue(OFFERED["verl"]), old_values=None, values=None)
    return make_and_learn(config(folder, preset), ThreadWorld(0, 1, threading.Barrier(1), [None]), numbers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "algo").mkdir()
    return tmp_path


def test_an_advantage_estimator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = AdvantageEstimator(f"{__name__}.doubled_scores", "Twice the score.", needs_group=True)
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "doubled", entry)
    own = "advantage: { estimator: doubled, whiten: none }\nkl: { coef: 0 }\n"
    (folder / "algo" / "mine.yaml").write_text(own + "reward_shaping: { clip: null }\n")
    experience = run(folder, "mine").experience
    expected = 2 * experience.scores[:, None] * experience.response_mask
    torch.testing.assert_close(experience.advantages, expected)


def test_a_policy_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        POLICY_LOSSES, "tripled", PolicyLoss(f"{__name__}.tripled_loss", "Three times PPO's.")
    )
    common = "advantage: { estimator: dr_grpo, whiten: none }\nentropy: { coef: 0 }\n"
    (folder / "algo" / "mine.yaml").write_text(common + "policy: { loss: tripled }\n")
    (folder / "algo" / "usual.yaml").write_text(common)
    mine, usual = (gradient_of(run(folder, preset).actor) for preset in ("mine", "usual"))
    assert usual.any()
    torch.testing.assert_close(mine, 3 * usual)


def test_a_loss_aggregation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = LossAggregation(f"{__name__}.doubled_mean", "Twice the mean.")
    monkeypatch.setitem(LOSS_AGGREGATIONS, "doubled", entry)
    common = "advantage: { estimator: dr_grpo, whiten: none }\n"
    (folder / "algo" / "mine.yaml").write_text(common + "loss: { agg: doubled }\n")
    (folder / "algo" / "usual.yaml").write_text(common)
    mine, usual = (gradient_of(run(folder, preset).actor) for preset in ("mine", "usual"))
    assert usual.any()
    torch.testing.assert_close(mine, 2 * usual)
