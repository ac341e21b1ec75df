"""Tests rules against the numbers printed in the seed, its regular expressions, and hand-computed numbers."""

import random
import re
from pathlib import Path

import pytest
import torch

from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.rewards.base import Responses, RewardError
from ppo_ds.rewards.rules import (
    ExactMatchReward,
    FormatReward,
    LengthReward,
    NumericReward,
    RegexReward,
    RepetitionPenalty,
)
from tests.rewards.reward_cases import make_rollout
from tests.support.cpu import cpu_limit

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
from tests.goldens.golden_io import load

# MiniMind's regular expressions
SEED = (
    r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$",
    r"^<think>\n.*?\n</think>\n\n<answer>\n.*?\n</answer>$",
)
WELL_FORMED = "<think>\na\n</think>\n<answer>\nb\n</answer>"


def responses_of(*texts, rows=None):
    rows = [{"prompt_text": "q", **row} for row in rows or [{}] * len(texts)]
    return Responses(tuple(rows), texts, (True,) * len(texts))


@pytest.fixture
def rates(tokenizer):
    """Returns a function that scores texts by a rule with the given settings."""

    def run(kind, *texts, rows=None, **settings):
        return (
            kind(**settings, tokenizer=tokenizer, key="reward.parts.r.reward")
            .score_responses(responses_of(*texts, rows=rows))
            .tolist()
        )

    return run


def one(reference):
    return [{"answer": reference}]


# -- format


def test_the_seeds_printed_numbers(rates):
    (case,) = [
        case
        for case in load(GOLDENS / "seed_examples.json", to="torch")["cases"]
        if case["id"] == "c_reasoning_rewards"
    ]
    texts, wanted = (
        case["inputs"]["texts"],
        {name: torch.as_tensor(column).tolist() for name, column in case["outputs"].items()},
    )
    assert rates(FormatReward, *texts, tag_score=0.0) == wanted["format"]
    assert rates(FormatReward, *texts, pattern_score=0.0) == wanted["mark"]
    assert rates(FormatReward, *texts) == [1.5, 1.5, 1.0, 0.0, 0.75, 1.0]


def test_the_patterns_match_what_the_seeds_match(rates):
    """Compares both on texts that are combined from pieces of the format."""
    draw = random.Random(0)
    pieces = [
        "<think>\n",
        "\n</think>\n<answer>\n",
        "\n</think>\n\n<answer>\n",
        "\n</answer>",
        "\n",
        "a",
        "</answer>",
        "<answer>",
        "</think>",
    ]
    texts = [
        "<think>\n" * draw.randint(0, 3) + "".join(draw.choices(pieces, k=draw.randint(1, 7))) + "\n</answer>"
        for _ in range(10_000)
    ]
    wanted = [0.5 * any(re.match(pattern, text, re.S) is not None for pattern in SEED) for text in texts]
    assert rates(FormatReward, *texts, tag_score=0.0) == wanted
    assert 0.1 < sum(wanted) / 0.5 / len(wanted) < 0.9


def test_long_repetitive_responses_take_linear_time(rates):
    for middle in ("\n</think>\n<answer>\n", "\n</think>\n", "<answer>", "\n"):
        with cpu_limit(60):  # seconds; backtracking patterns would take many minutes
            assert rates(FormatReward, "<think>\n" + middle * 100_000, tag_score=0.0) == [0.0]


def test_another_format(rates):
    settings = dict(patterns=(r"^Answer: \d+$",), pattern_score=2.0, tags=("Answer:", "###"), tag_score=0.5)
    assert rates(FormatReward, "Answer: 5", "Answer: x", "Answer: Answer: ###", "", **settings) == [
        2.5,
        0.5,
        0.5,
        0.0,
    ]


def test_tags_that_decoding_removes_are_refused(tokenizer, tmp_path):
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="^reward.tags: the actor's tokenizer decodes <think> to ''"):
        FormatReward(tokenizer=load_tokenizer(str(tmp_path)))
    with pytest.raises(UserError, match="^reward.inside=think: the actor's tokenizer decodes <think> to ''"):
        RegexReward("x", inside="think", tokenizer=load_tokenizer(str(tmp_path)))
    RegexReward("x", inside="answer", tokenizer=load_tokenizer(str(tmp_path)))
    with pytest.raises(UserError, match="decodes <answer> to"):
        RegexReward("x", inside="answer", tokenizer=character_tokenizer("0123456789"))


# -- inside a tag


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("so <answer> 4 </answer> it is", "4"),
        ("<answer>\n4\n</answer><answer>5</answer>", "4"),
        ("</answer><answer>4</answer>", "4"),
        ("<answer>3<answer>4</answer>", "3<answer>4"),
        ("<answer></answer>", ""),
        ("<answer>4", None),
        ("4</answer>", None),
        ("</answer>4<answer>", None),
        ("4", None),
    ],
)
def test_inside_matches_the_seeds_search(rates, text, inner):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert (found and found[1].strip()) == inner
    assert responses_of(text).inside("answer").texts == (inner or "",)
    assert rates(ExactMatchReward, text, rows=one("4"), inside="answer") == [float(inner == "4")]


def test_tagged_text_is_finished_and_missing_tags_leave_finished_unchanged():
    cut = Responses(
        ({},) * 3, ("<answer>4</answer> and", "<answer></answer> and", "<answer>4"), (False, False, False)
    )
    assert cut.inside("answer").finished == (True, True, False)


# -- references


@pytest.mark.parametrize("kind", [ExactMatchReward, NumericReward])
def test_a_missing_reference_stops_the_run(rates, kind):
    with pytest.raises(RewardError) as caught:
        rates(kind, "4", rows=[{"question": "2+2", "target": "4"}])
    key = "reward.parts.r.reward.column"
    assert (
        str(caught.value)
        == f"{key}=answer: no such column in the rows; they have prompt_text, question, target; set {key}"
    )
    for nothing in (None, "", "  \n", [], [None], ["4", ""], float("nan")):
        with pytest.raises(
            RewardError, match="^reward.parts.r.reward.column=answer: the reference is empty for prompt 'q'"
        ):
            rates(kind, "4", rows=one(nothing))


@pytest.mark.parametrize("kind", [ExactMatchReward, NumericReward])
def test_a_reference_that_is_neither_text_nor_number_stops_the_run(rates, kind):
    for value, seen in (
        ({"a": 5}, "\"{'a': 5}\""),
        (True, "'True'"),
        ([5, [6]], "'[6]'"),
        ([False], "'False'"),
    ):
        with pytest.raises(RewardError) as caught:
            rates(kind, "5", rows=one(value))
        wanted = (
            f"reward.parts.r.reward.column=answer: the reference {seen} is neither a text "
            "nor a number; correct it, or name another column"
        )
        assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("text", "reference", "settings", "score"),
    [
        ("5", 5.0, {}, 1.0),
        ("5.0", 5.0, {}, 0.0),
        ("5.5", 5.5, {}, 1.0),
        ("-5", [-5.0, 1e20], {}, 1.0),
        ("100000000000000000000", [-5.0, 1e20], {}, 1.0),
        ("5.0", "5.0", {}, 1.0),
        ("blue", "blue", {}, 1.0),
        (" blue\n", "blue ", {}, 1.0),
        (" blue", "blue", dict(strip=False), 0.0),
        ("Blue", "blue", {}, 0.0),
        ("STRASSE", "Straße", dict(ignore_case=True), 1.0),
        ("light blue", "blue", {}, 0.0),
        ("7", 7, {}, 1.0),
        ("plum", ["apple", "plum"], {}, 1.0),
        ("pear", ["apple", "plum"], dict(score=3.0, miss=-0.5), -0.5),
        ("plum", ["apple", "plum"], dict(score=3.0, miss=-0.5), 3.0),
        ("I think <answer>plum</answer>", "plum", dict(inside="answer"), 1.0),
        ("plum", "plum", dict(inside="answer"), 0.0),
    ],
)
def test_exact_match(rates, text, reference, settings, score):
    assert rates(ExactMatchReward, text, rows=one(reference), **settings) == [score]


def test_the_column_can_be_set(rates):
    assert rates(ExactMatchReward, "a", "b", rows=[{"target": "a"}, {"target": "a"}], column="target") == [
        1.0,
        0.0,
    ]


# -- pattern


@pytest.mark.parametrize(
    ("text", "settings", "score"),
    [
        ("yes, please", dict(pattern=r"\bplease\b"), 1.0),
        ("pleased", dict(pattern=r"\bplease\b"), 0.0),
        ("yes, please", dict(pattern="please", full=True), 0.0),
        ("please", dict(pattern="please", full=True), 1.0),
        ("please\n", dict(pattern="please", full=True), 0.0),
        ("PLEASE", dict(pattern="(?i)please"), 1.0),
        ("bad word", dict(pattern="bad", score=-1.0, miss=0.25), -1.0),
        ("good word", dict(pattern="bad", score=-1.0, miss=0.25), 0.25),
        ("12 <answer>x</answer>", dict(pattern=r"\d", inside="answer"), 0.0),
    ],
)
def test_regex(rates, text, settings, score):
    assert rates(RegexReward, text, **settings) == [score]


# -- length


@pytest.mark.parametrize(
    ("length", "score"),
    zip((0, 1, 2, 4, 5, 7, 10, 11, 13, 14, 99), (0, 0, 0.25, 0.75, 1, 1, 1, 0.75, 0.25, 0, 0), strict=True),
)
def test_length_ramps_outside_of_the_range(rates, length, score):
    settings = dict(shortest=5, longest=10, ramp=4)
    for unit in ("characters", "tokens"):  # the tokenizer has one token per byte
        assert rates(LengthReward, "x" * length, unit=unit, **settings) == [score]
    assert rates(LengthReward, "x" * length, unit="characters", score=-2.0, **settings) == [-2.0 * score]


def test_length_counts_tokens_or_characters_and_may_have_one_bound(rates):
    assert rates(LengthReward, "ééé", longest=4, ramp=4) == [0.5]  # 6 bytes
    assert rates(LengthReward, "ééé", longest=4, ramp=4, unit="characters") == [1.0]
    assert rates(LengthReward, "", "x" * 500, longest=500) == [1.0, 1.0]
    assert rates(LengthReward, "", "x" * 500, shortest=2, ramp=4) == [0.5, 1.0]
    assert rates(LengthReward, "long thought <answer>x</answer>", longest=1, ramp=1, inside="answer") == [1.0]


def test_length_bounds_are_required_and_ordered(rates):
    with pytest.raises(UserError, match="^reward.parts.r.reward.longest is missing"):
        rates(LengthReward, "")
    with pytest.raises(
        UserError, match="^reward.parts.r.reward.longest=3: must be at least reward.parts.r.reward.shortest=4"
    ):
        rates(LengthReward, "", shortest=4, longest=3)


# -- repetition


@pytest.mark.parametrize(
    ("text", "settings", "score"),
    [
        ("a b c a b c", {}, -0.25),  # 3-grams abc, bca, cab, abc: 3 of 4 are distinct
        ("a a a a a a", {}, -0.75),  # 1 of 4 is distinct
        ("A a A a A a", {}, -0.75),
        ("a b c d e f", {}, 0.0),
        ("a b c", {}, 0.0),
        ("a b", {}, 0.0),
        ("", {}, 0.0),
        ("a a a a a a", dict(max_penalty=-0.5), -0.375),
        ("a b a b a", dict(n=2), -0.5),  # 2-grams ab, ba, ab, ba
        ("x y x y", dict(n=1), -0.5),
        ("abab", dict(n=2, unit="characters"), -1 / 3),  # 2-grams ab, ba, ab
        ("abab", dict(n=2), 0.0),  # a single word
        ("éé", dict(n=2, unit="tokens"), -1 / 3),  # bytes 1, 2, 1, 2: 2-grams 12, 21, 12
        ("a a a a <answer>a b c d</answer>", dict(inside="answer"), 0.0),
    ],
)
def test_repetition(rates, text, settings, score):
    assert rates(RepetitionPenalty, text, **settings) == [pytest.approx(score)]


def test_a_positive_penalty_is_refused():
    with pytest.raises(UserError, match="^reward.max_penalty=1: must be at most 0$"):
        bind({"_target_": "ppo_ds.rewards.rules.RepetitionPenalty", "max_penalty": 1}, "reward")


def test_a_rule_is_a_reward_of_a_rollout(tokenizer):
    """End tokens are not part of the text; each row has one score, and tokens have none."""
    rollout = make_rollout(
        tokenizer, [("1+1=", "2"), ("2+2=", "5")], [{"answer": "2"}, {"answer": "4"}], finished=[True, False]
    )
    scores = ExactMatchReward(tokenizer=tokenizer)(rollout)
    assert scores.total.tolist() == [1.0, 0.0] and scores.total.dtype == torch.float32
    assert (
        scores.per_token.shape == rollout.response_mask.shape
        and scores.per_token.abs().max() == 0
        and scores.components == {}
    )
    assert FormatReward(tokenizer=tokenizer)(
        make_rollout(tokenizer, [("q", WELL_FORMED)])
    ).total.tolist() == [1.5]
