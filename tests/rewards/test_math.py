"""Tests reward=math: its answers, a reference that is none, and an environment without the extra."""

import sys
from pathlib import Path

import pytest
import yaml

from ppo_ds.background.user_code import load_object
from ppo_ds.errors import UserError
from ppo_ds.rewards.function import FunctionReward
from tests.config.commands import MINIMAL, problems
from tests.rewards.reward_cases import make_rollout

PATH = "ppo_ds.rewards.math:score"


@pytest.fixture
def module(monkeypatch):
    """Makes the module be imported again, and forgotten after the test."""
    monkeypatch.delitem(sys.modules, "ppo_ds.rewards.math", raising=False)
    yield
    sys.modules.pop("ppo_ds.rewards.math", None)


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("the answer is $2\\sqrt{3}$", "\\sqrt{12}", 1),
        ("\\boxed{\\{1,2\\}}", "\\{2, 1\\}", 1),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("answer 42", "40 + 2\n#### 42", 1),
        ("\\boxed{1,234}", 1234, 1),
        ("\\boxed{\\frac{3}{4}}", "that is \\boxed{0.75}", 1),
        ("The answer is 50%.", "50%", 1),
        ("so \\boxed{50%}", "50%", 1),
        ("0.5", "50\\%", 1),
        ("6", ["5", "6"], 1),
        ("7", ["5", "6"], 0),
        ("43", "42", 0),
        ("I do not know.", "\\frac12", 0),
        ("", "42", 0),
    ],
)
def test_results_are_compared_as_mathematics(module, response, reference, score):
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    assert load_object(PATH, "reward.path", "function")(["p"], [response], [{"answer": reference}]) == [score]


@pytest.mark.parametrize("answer", ["", None, ["5", None]])
def test_an_empty_reference_ends_the_run(module, answer):
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    with pytest.raises(ValueError, match="^the reference '' is no mathematical expression$"):
        load_object(PATH, "reward.path", "function")(["p"], ["1"], [{"answer": answer}])


def test_without_the_extra_one_line_names_the_remedy(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError) as caught:
        load_object(PATH, "reward.path", "function")
    (line,) = caught.value.problems
    assert line == (
        f"reward.path={PATH}: cannot import ppo_ds.rewards.math: ImportError: the package math-verify is not "
        "installed; run: pip install -c constraints.txt -e '.[math]'"
    )


def test_the_config_is_valid():
    settings = [line for line in MINIMAL if not line.startswith("reward")]
    assert problems(*settings, "reward=math", "reward.timeout_seconds=5") == []


@pytest.mark.slow
def test_hostile_responses_end_at_the_time_limit(tokenizer, capfd):
    """The limit of math-verify itself ends 9**9**9, but not always the factorial, whose process is killed."""
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    settings = yaml.safe_load(Path("conf/reward/math.yaml").read_text())
    assert settings.pop("_target_").endswith(".FunctionReward") and settings["pool"] == "process"
    reward = FunctionReward(**settings | {"timeout_seconds": 20}, tokenizer=tokenizer)
    cases = {
        "\\boxed{\\frac{6}{8}}": "\\frac34",
        "$\\{2,1\\}$": "\\{1,2\\}",
        "9**9**9": "42",
        "\\boxed{10^{10^{10}}!}": "(x+1)^2",
        "(" * 2000 + "1": "42",
    }
    pairs = [("p", response) for response in cases]
    scores = reward(make_rollout(tokenizer, pairs, [{"answer": answer} for answer in cases.values()]))
    assert scores.total.tolist() == [1, 1, 0, 0, 0]
    assert scores.components["fallback"][[0, 1, 2, 4]].tolist() == [0, 0, 0, 0]
    assert capfd.readouterr().err == ""
