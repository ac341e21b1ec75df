"""Tests reward=reasoning_gym: the answer of a response, the settings of verifiers, and those that raise."""

import importlib
import sys
from pathlib import Path

import pytest
import yaml

from ppo_ds.background.user_code import load_object
from ppo_ds.background.values import NoResult
from ppo_ds.errors import UserError
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.function import FunctionReward
from tests.config.commands import MINIMAL, problems
from tests.rewards.reward_cases import make_rollout

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
PATH = "ppo_ds.rewards.reasoning_gym:score"
SHIPPED = yaml.safe_load(Path("conf/reward/reasoning_gym.yaml").read_text())


def row(task, answer, **settings):
    entry = {"question": "?", "answer": answer, "metadata": {}}
    return {"answer": answer, "task": task, "reasoning_gym": {"settings": settings, "entry": entry}}


def score(response, row):
    (found,) = importlib.import_module("ppo_ds.rewards.reasoning_gym").score(["p"], [response], [row])
    return found


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("12", 1),
        (" +12.0\n", 1),
        ("<think>3 + 9</think><answer> 12 </answer>", 1),
        ("<answer>3</answer> no: <answer>12</answer> That is it.", 1),
        ("<answer>12</answer> or <answer>3</answer>", 0),
        ("<answer>3<answer>12</answer>", 1),
        (
            "it is 12",
            2 / 8,
        ),  # the verifier's score of an answer that contains the right one: share of its length
        ("<answer>12", 2 / 10),
        ("</answer>12<answer>", 2 / 19),
        ("", 0),
    ],
)
def test_the_last_answer_is_scored(response, expected):
    assert score(response, row("chain_sum", "12")) == pytest.approx(expected)


def test_the_verifier_has_the_settings_of_the_row():
    assert score("10 + 10 + 2 + 2", row("puzzle24", None)) == 1  # by default numbers are at most 10
    assert score("10 + 10 + 2 + 2", row("puzzle24", None, max_value=9)) == 0.01


def test_a_verifier_that_raises_has_no_result():
    assert score("2 × 3", row("prime_factorization", "2 × 3")) == 1
    with pytest.raises(
        NoResult, match=r"^gave no result: the verifier of prime_factorization raised ValueError"
    ):
        score("I do not know", row("prime_factorization", "2 × 3"))


def test_a_row_of_other_data_is_an_error():
    with pytest.raises(
        ValueError, match=r"^the row is not made by a task; set data\.path=reasoning_gym:TASK$"
    ):
        score("12", {"answer": "12"})


def test_the_shipped_reward_counts_responses_without_a_result(tokenizer, capfd):
    settings = {name: value for name, value in SHIPPED.items() if name != "_target_"}
    assert settings["pool"] == "process" and settings["path"] == PATH
    rows = [row("prime_factorization", "2 × 3")] * 3 + [row("chain_sum", "12")]
    pairs = [("p", "2 × 3"), ("p", "what?"), ("p", "6"), ("p", "<answer>12</answer>")]
    rollout = make_rollout(tokenizer, pairs, rows)
    scores = FunctionReward(**settings, workers=1, tokenizer=tokenizer)(rollout)
    assert scores.total.tolist() == pytest.approx([1, 0, 0.5, 1])
    assert scores.components["fallback"].tolist() == [0, 1, 0, 0]
    for pool in ("process", "thread"):
        strict = settings | {"fallback_score": None, "pool": pool}
        with pytest.raises(
            RewardError, match=r"prime_factorization raised ValueError.*set reward\.fallback_score"
        ):
            FunctionReward(**strict, tokenizer=tokenizer)(rollout)
    assert capfd.readouterr().out == ""


def test_without_the_extra_one_line_names_the_remedy(monkeypatch):
    monkeypatch.delitem(sys.modules, "ppo_ds.rewards.reasoning_gym", raising=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym.dataset", None)
    with pytest.raises(UserError) as caught:
        load_object(PATH, "reward.path", "function")
    assert caught.value.problems == [
        f"reward.path={PATH}: cannot import ppo_ds.rewards.reasoning_gym: ImportError: the package "
        "reasoning-gym is not installed; run: pip install -c constraints.txt -e '.[reasoning-gym]'"
    ]


def test_the_config_is_valid():
    settings = [line for line in MINIMAL if not line.startswith(("reward", "data"))]
    assert (
        problems(*settings, "reward=reasoning_gym", "data.path=reasoning_gym:gcd", "reward.workers=2") == []
    )
