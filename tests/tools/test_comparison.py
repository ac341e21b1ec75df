"""Tests the statistics of an evaluation against numbers worked by hand and exact bootstrap distributions."""

from __future__ import annotations

import itertools

import pytest

from ppo_ds.tools.comparison import compare, estimate, table, wins


def test_a_tie_is_half_a_win() -> None:
    assert wins([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == [0.0, 0.5, 1.0]


def test_models_are_compared_prompt_by_prompt() -> None:
    """The mean scores of a and b are equal, but b wins on three of four prompts."""
    found = compare({"a": [0.0, 0.0, 0.0, 6.0], "b": [2.0, 2.0, 2.0, 0.0], "c": [2.0, 2.0, 2.0, 0.0]})
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
    rewards = {"reward": compare({"base": [0.0, 1.0], "sft": [1.0, 1.0], "ppo": [2.0, 1.0]})}
    text = table({"data": "held.jsonl", "prompts": 2, "rewards": rewards})
    lines = [line.split() for line in text.splitlines()]
    assert "2 prompts of held.jsonl" in text
    assert lines[3] == ["base", "0.500", "[0.000,", "1.000]", "-", "-"]
    assert lines[5] == "ppo 1.500 [1.000, 2.000] 75.0 % [50.0, 100.0] 75.0 % [50.0, 100.0]".split()
