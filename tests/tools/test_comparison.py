"""Tests the statistics of an evaluation against numbers worked by hand and exact bootstrap distributions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ppo_ds.tools.comparison import as_percent, compare, estimate, outcomes, pass_at_k, pass_rates, table


def single(**scores: list[float]) -> dict[str, Any]:
    """Compares models by one response to each prompt; all responses differ."""
    return distinct(**{name: [[value] for value in values] for name, values in scores.items()})


def distinct(**scores: list[list[float]]) -> dict[str, Any]:
    texts = {
        name: [[f"{name}{i}" for i in range(len(group))] for group in groups]
        for name, groups in scores.items()
    }
    return compare(scores, texts)


def test_models_are_compared_prompt_by_prompt() -> None:
    """The mean scores of a and b are equal, but b wins on three of four prompts."""
    found = single(a=[0.0, 0.0, 0.0, 6.0], b=[2.0, 2.0, 2.0, 0.0], c=[2.0, 2.0, 2.0, 0.0])
    assert found["score"]["a"]["mean"] == found["score"]["b"]["mean"] == 1.5
    assert set(found["win_rate"]) == {"b", "c"} and set(found["win_rate"]["c"]) == {"a", "b"}
    assert found["win_rate"]["b"]["a"]["mean"] == 0.75
    assert found["win_rate"]["c"]["b"] == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_the_interval_is_that_of_all_resamples() -> None:
    """Compares with the quantiles of all 6^6 resamples of six values."""
    values = [0.0, 1.0, 1.0, 2.0, 5.0, 9.0]
    means = sorted(sum(sample) / 6 for sample in itertools.product(values, repeat=6))
    found = estimate(values)
    assert found["mean"] == pytest.approx(3.0)
    assert found["low"] == pytest.approx(means[round(0.025 * len(means))], abs=0.17)
    assert found["high"] == pytest.approx(means[round(0.975 * len(means))], abs=0.17)
    assert estimate(values) == found  # the same random numbers in each call
    assert estimate([0.25] * 7) == {"mean": 0.25, "low": 0.25, "high": 0.25}


def test_the_table_names_models_scores_and_win_rates() -> None:
    rewards = {"reward": single(base=[0.0, 1.0], sft=[1.0, 1.0], ppo=[2.0, 1.0])}
    text = table({"data": "held.jsonl", "prompts": 2, "rewards": rewards})
    lines = [line.split() for line in text.splitlines()]
    assert "2 prompts of held.jsonl" in text
    assert lines[3] == ["base", "0.500", "[0.000,", "1.000]", "-", "-"]
    assert lines[5] == "ppo 1.500 [1.000, 2.000] 75.0 % [50.0, 100.0] 75.0 % [50.0, 100.0]".split()


def test_each_response_is_compared_with_each_other_response() -> None:
    found = distinct(a=[[0.0, 1.0], [1.0, 1.0]], b=[[1.0, 1.0], [1.0, 1.0]])
    assert found["score"]["a"]["mean"] == 0.75
    assert found["win_rate"]["b"]["a"]["mean"] == pytest.approx((0.75 + 0.5) / 2)
    assert found["against_first"] == {"b": {"won": 0.25, "tied": 0.75, "lost": 0.0}}


def test_equal_responses_tie_whatever_their_scores() -> None:
    """The scores of a reward model depend slightly on the other rows of a batch."""
    scores = {"a": [[0.5], [0.5]], "b": [[0.5 + 1e-7], [0.7]]}
    found = compare(scores, {"a": [["x"], ["y"]], "b": [["x"], ["z"]]})
    assert found["win_rate"]["b"]["a"]["mean"] == 0.75
    assert found["against_first"] == {"b": {"won": 0.5, "tied": 0.5, "lost": 0.0}}
    texts = [["x", "y"]], [["y", "w"]]  # of the four pairs, (y, y) ties
    assert outcomes([[1.0, 2.0]], [[0.0, 3.0]], *texts).tolist() == [[0.25, 0.25, 0.5]]


def test_the_interval_resamples_prompts_and_not_responses() -> None:
    """Eight responses to each of two prompts are two independent values, not sixteen."""
    of_means = single(a=[0.0, 1.0])["score"]["a"]
    assert distinct(a=[[0.0] * 8, [1.0] * 8])["score"]["a"] == of_means
    assert of_means == {"mean": 0.5, "low": 0.0, "high": 1.0}


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response() -> None:
    for count in range(1, 8):
        for correct, k in itertools.product(range(count + 1), range(1, count + 1)):
            subsets = list(itertools.combinations(range(count), k))
            share = sum(min(subset) < correct for subset in subsets) / len(subsets)
            assert pass_at_k(count, correct, k) == pytest.approx(share, abs=1e-12)
    assert pass_at_k(20_000, 1, 5_000) == pytest.approx(0.25)  # the binomial coefficients overflow


def test_pass_rates_have_powers_of_two_and_the_number_of_responses() -> None:
    rates = pass_rates([[True, False, False], [False, False, False]])
    assert {k: rate["mean"] for k, rate in rates.items()} == pytest.approx({"1": 1 / 6, "2": 1 / 3, "3": 0.5})
    assert list(pass_rates([[True] * 8])) == ["1", "2", "4", "8"]


@pytest.mark.parametrize(
    ("share", "shown"), [(0.0625, "6.3"), (0.5275, "52.8"), (0.4375, "43.8"), (0.95, "95.0")]
)
def test_percents_are_rounded_as_in_the_page(share: float, shown: str) -> None:
    """toFixed(1) of JavaScript rounds 6.25 up, and Python's format to even."""
    assert as_percent({"mean": share, "low": share, "high": 1.0}) == f"{shown} % [{shown}, 100.0]"


def test_the_table_has_pass_rates_the_judge_and_the_responses() -> None:
    one = {"mean": 0.5, "low": 0.25, "high": 0.75}
    result = {
        "data": "x.jsonl", "prompts": 4, "decoding": {"samples": 2, "greedy": False}, "rewards": {},
        "pass_at_k": {"reward": {"correct_above": 0.5, "models": {"a": {"1": one, "2": one}}}},
        "judge": {
            "first": "a", "function": "j.py:f", "models": {"b": {"win_rate": one, "disagreement": 0.125}}
        },
        "kl": {"name": "KL", "first": "a", "models": {"b": one}},
        "responses": {
            "a": {"tokens_mean": 3.25, "finished_frac": 1.0}, "b": {"tokens_mean": 4, "finished_frac": 0.5}
        },
        "tokens_per_second": {"a": 1234.4, "b": 10.0},
        "remarks": ["no KL of c to a"],
    }  # fmt: skip
    text = table(result)
    assert "2 sampled response(s) each" in text and "pass@2 (reward)" in text
    assert "b 50.0 % [25.0, 75.0] 12.5 %".split() in [line.split() for line in text.splitlines()]
    assert text.splitlines()[-3].split() == ["a", "3.3", "100.0", "%", "-", "1,234"]
    assert text.splitlines()[-2].split() == "b 4.0 50.0 % 0.500 [0.250, 0.750] 10".split()
    assert text.endswith("  no KL of c to a")
