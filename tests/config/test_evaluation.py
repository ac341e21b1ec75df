"""Tests the checks of the evaluation: its rewards, the best checkpoint and the early stop."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from ppo_ds.config.checks.evaluation import eval_metrics
from ppo_ds.config.registry import STAGES
from ppo_ds.config.schema import all_rewards, best_metric, lower_is_better
from ppo_ds.finetune.pair_scores import PairScores
from tests.config.commands import MINIMAL, complaints, compose, problems

EVALUATED = (*MINIMAL, "data.eval_path=org/heldout", "eval.every=5")
SHORT = "+reward@eval.rewards.short=length"
SFT = (
    "+experiment=sft", "actor.model.path=org/actor", "data.path=org/texts", "data.eval_path=org/heldout",
    "eval.every=5", "checkpoint.keep_best=true",
)  # fmt: skip
SCORER = ("+experiment=reward_model", "scorer.model.path=org/scorer", "data.path=org/pairs", *SFT[3:])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            [*MINIMAL, "eval.patience=3"],
            "eval.patience=3: counts evaluations without improvement; set eval.every and data.eval_path",
        ),
        ([*EVALUATED, "eval.patience=0"], "eval.patience=0: must be at least 1 or null"),
        (
            [*EVALUATED, "checkpoint.best_mode=most"],
            "checkpoint.best_mode=most: must be one of auto, max, min",
        ),
        (
            [*EVALUATED, "checkpoint.best_by=eval/score_mean"],
            "checkpoint.best_by=eval/score_mean: needs checkpoint.keep_best=true (it is false)",
        ),
        (
            [*EVALUATED, "eval.patience=2", "checkpoint.best_by=eval/acuracy", "eval.correct_above=1"],
            "checkpoint.best_by=eval/acuracy: the evaluations of this run do not measure it; use one of "
            "eval/score_mean, eval/score_std, eval/resp_len_mean, eval/stop_frac, eval/win_rate_vs_ref, "
            "eval/accuracy; did you mean eval/accuracy?",
        ),
        (
            [*EVALUATED, "eval.patience=2", "checkpoint.best_by=eval/accuracy"],
            "checkpoint.best_by=eval/accuracy: the evaluations of this run do not measure it",
        ),
        (
            [*SFT, "checkpoint.best_by=eval/score_mean"],
            "checkpoint.best_by=eval/score_mean: the evaluations of this run do not measure it; use one of "
            "eval/loss, eval/perplexity, eval/token_accuracy",
        ),
        ([*SFT, SHORT], "eval.rewards.short._target_=ppo_ds.rewards.rules.LengthReward: stage=sft does not"),
        (
            [*EVALUATED, SHORT, "eval.rewards.short.shorter=4"],
            "eval.rewards.short.shorter=4: no such key; did you mean eval.rewards.short.shortest?",
        ),
        (
            [*EVALUATED, "eval.rewards.short.shortest=4"],
            "eval.rewards.short._target_ is missing: add the reward as +reward@eval.rewards.short=GROUP",
        ),
        (
            [*EVALUATED, "+reward@eval.rewards.score=exact_match"],
            "eval.rewards.score: must be a name of letters, digits, _ and - other than score and resp_len",
        ),
        ([*MINIMAL, "+reward@eval.rewards.right=exact_match"], "eval.rewards=right: score responses to held"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(arguments: list[str], line: str) -> None:
    (found,) = complaints(*arguments)
    assert found.startswith(line), found


@pytest.mark.parametrize(
    ("arguments", "metric", "lower"),
    [
        (EVALUATED, "eval/score_mean", False),
        (SFT, "eval/loss", True),
        ([*SFT, "checkpoint.best_by=eval/token_accuracy"], "eval/token_accuracy", False),
        (SCORER, "eval/accuracy", False),
        ([*SCORER, "checkpoint.best_by=eval/accuracy/maths"], "eval/accuracy/maths", False),
        ([*SCORER, "checkpoint.best_by=eval/calibration_error"], "eval/calibration_error", True),
        ([*EVALUATED, "eval.patience=3", "checkpoint.best_by=eval/score_std"], "eval/score_std", True),
        (
            [
                *EVALUATED,
                "eval.patience=3",
                "checkpoint.best_by=eval/resp_len_mean",
                "checkpoint.best_mode=min",
            ],
            "eval/resp_len_mean",
            True,
        ),
    ],
)
def test_the_metric_and_its_direction(arguments: list[str], metric: str, lower: bool) -> None:
    config = compose(*arguments)
    assert (best_metric(config), lower_is_better(config)) == (metric, lower)


def test_patience_keeps_the_best_checkpoint() -> None:
    assert not compose(*EVALUATED).checkpoint.keep_best
    assert compose(*EVALUATED, "eval.patience=3").checkpoint.keep_best


def test_a_reward_of_the_evaluation_is_a_reward_of_any_group() -> None:
    bounds = ["eval.rewards.short.shortest=1", "eval.rewards.short.longest=9"]
    config = compose(
        *EVALUATED, SHORT, *bounds, "+reward@eval.rewards.right=exact_match", "eval.patience=2",
        "checkpoint.best_by=eval/short_mean",
    )  # fmt: skip
    assert list(all_rewards(config)) == ["reward", "eval.rewards.short", "eval.rewards.right"]
    assert config.eval.rewards["short"]["longest"] == 9 and eval_metrics(config)[-2:] == [
        "eval/short_mean",
        "eval/right_mean",
    ]


def test_files_of_a_reward_model_in_an_evaluation_are_checked(tmp_path: Path) -> None:
    model = "+reward@eval.rewards.gold=model"
    lines = problems(*EVALUATED, model, f"eval.rewards.gold.model.path={tmp_path}/none")
    assert lines == [f"eval.rewards.gold.model.path={tmp_path}/none: no such folder"]


def test_every_metric_of_a_reward_models_evaluation_can_select_the_best_checkpoint() -> None:
    scores = PairScores(
        torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3, 4], [5, 5]]), ["maths", None]
    )
    patterns = STAGES["reward_model"].eval_metrics
    for name in scores.metrics():
        assert any(fnmatchcase(name, pattern) for pattern in patterns), name


def test_a_learned_reward_has_no_bound_of_a_correct_response() -> None:
    experiment = "+experiment=quickstart"
    assert compose(experiment).eval.correct_above == 0.5
    assert compose(experiment, "reward=model", "reward.model.path=org/rm").eval.correct_above is None
    mixed = ["reward=weighted", "+reward.parts.a.reward._target_=ppo_ds.rewards.rules.LengthReward"]
    assert compose(experiment, *mixed).eval.correct_above == 0.5
