"""Tests that a judge of pairs is called in both orders, and what it may return."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_ds.errors import UserError
from ppo_ds.tools.pairwise_judge import PairwiseJudge

ROWS = [{"answer": "x"}, {"answer": "y"}]
FUNCTIONS = """
import numpy

def longer(prompts, responses_a, responses_b, rows):
    return [0.5 if len(a) == len(b) else float(len(a) > len(b)) for a, b in zip(responses_a, responses_b)]

def first_place(prompts, responses_a, responses_b, rows):
    prompts.clear(), rows.clear()
    return numpy.ones(len(responses_a))

def unsure(prompts, responses_a, responses_b, rows):
    return [0.9 if a == row["answer"] else 0.5 for a, row in zip(responses_a, rows)]

async def later(prompts, responses_a, responses_b, rows):
    return [a > b for a, b in zip(responses_a, responses_b)]

def too_many(prompts, responses_a, responses_b, rows):
    return [1, 0, 1]

def percent(prompts, responses_a, responses_b, rows):
    return [1, 55]

def number(prompts, responses_a, responses_b, rows):
    return 0.5

def fails(prompts, responses_a, responses_b, rows):
    return [row["gone"] for row in rows]

def three(prompts, responses, rows):
    return []
"""


@pytest.fixture
def judge(tmp_path: Path):
    (tmp_path / "judges.py").write_text(FUNCTIONS)
    return lambda name: PairwiseJudge(f"{tmp_path}/judges.py:{name}")


def test_a_consistent_judge_has_no_bias(judge) -> None:
    verdicts = judge("longer")(["p", "q"], ["aa", "b"], ["a", "b"], ROWS)
    consistent = {"position_bias": 0.0, "disagrees": False}
    assert verdicts == [{"preference": 1.0} | consistent, {"preference": 0.5} | consistent]
    assert judge("later")(["p"], ["b"], ["a"], ROWS[:1])[0]["preference"] == 1.0
    assert judge("longer")([], [], [], []) == []


def test_a_preference_for_the_first_place_cancels(judge) -> None:
    """The function also changes its lists, which are copies."""
    prompts = ["p", "q"]
    verdicts = judge("first_place")(prompts, ["a", "b"], ["c", "d"], ROWS)
    assert [one["preference"] for one in verdicts] == [0.5, 0.5] and prompts == ["p", "q"]
    assert all(one["position_bias"] == 0.5 and one["disagrees"] for one in verdicts)


def test_both_orders_are_averaged(judge) -> None:
    """In order, response a is the answer: 0.9. Swapped, it is in the second place: 0.5 for the first."""
    [verdict] = judge("unsure")(["p"], ["x"], ["z"], ROWS[:1])
    assert verdict["preference"] == pytest.approx((0.9 + 0.5) / 2)
    assert verdict["position_bias"] == pytest.approx(0.2) and verdict["disagrees"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "too_many",
            "returned 3 scores for 2 responses; it must return a list with one number from 0 to 1 for each",
        ),
        ("percent", "returned 55.0 for the prompt 'q'; it must return a list with one number from 0 to 1"),
        ("number", "returned '0.5' .float.; it must return a list with one number"),
        ("fails", r"raised KeyError: 'gone' at .*judges.py:27; correct the function"),
        (
            "three",
            r"is called as fn\(prompts, responses_a, responses_b, rows\), but takes \(prompts, responses",
        ),
        ("missing", "has no missing; its functions are: longer, first_place"),
    ],
)
def test_a_wrong_judge_is_one_line(judge, name: str, line: str) -> None:
    with pytest.raises(UserError, match=f"^--judge=.*judges.py:{name}: .*{line}") as caught:
        judge(name)(["p", "q"], ["a", "b"], ["c", "d"], ROWS)
    assert len(caught.value.problems) == 1


def test_a_trial_call_has_the_first_row(judge) -> None:
    row = {"prompt_text": "p", "answer": "x"}
    judge("unsure").try_on(row)
    with pytest.raises(
        UserError, match=r"KeyError: 'gone'.* before the start .*\(keys of the row: prompt_text, a"
    ):
        judge("fails").try_on(row)
