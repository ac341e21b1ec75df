r"""Tests the extraction of numbers from responses, and their equality."""

import pytest

from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.numbers import boxed, reference_number, stated_number
from ppo_ds.rewards.rules import NumericReward
from tests.rewards.test_rules import responses_of
from tests.support.cpu import cpu_limit

INFINITE = float("inf")
QUADRATIC = 20  # seconds of CPU time; patterns of linear time take 1 s, of quadratic time many minutes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("From 3 and 4 follows 7", 7),
        ("10-3=-7", -7),
        ("10-3", 3),
        ("(5)-3", 3),
        ("= −5", -5),
        ("+5", 5),
        ("- 5 apples", 5),
        ("$1,234.50", 1234.5),
        ("-$5", -5),
        ("\\$ 5", 5),
        ("1,2,3", 3),
        ("1,234,567", 1234567),
        ("1{,}234", 1234),
        ("10,\\!000", 10000),
        (".5", 0.5),
        ("...42", 42),
        ("3.14.", 3.14),
        ("2e3", 2000),
        ("1.5e-2", 0.015),
        ("2e", 2),
        ("3/4", 0.75),
        ("-1 / 2", -0.5),
        ("3 1/2", 3.5),
        ("-3 1/2", -3.5),
        ("\\frac{3}{4}", 0.75),
        ("-\\dfrac{1}{2}", -0.5),
        ("\\frac{-1}{2}", -0.5),
        ("2\\frac{1}{2}", 2.5),
        ("\\frac12", 0.5),
        ("so -\\dfrac34.", -0.75),
        ("that is 10^6.", 1e6),
        ("3.5 x 10^-3 m", 0.0035),
        ("12 cm2", 12),
        ("5 m^2", 5),
        ("共42个", 42),
        ("４２", 42),
        ("2^{10}=1024", 1024),
        ("1/0", INFINITE),
        ("9" * 5000, INFINITE),
        ("1e999", INFINITE),
        ("#### 42", 42),
        ("#### 42 apples of 3 kinds", 42),
        ("#### 41\n then\n####\t-1,000\nin 5 steps", -1000),
        ("#### Step 3\nso 7", 7),
        ("\\boxed{42} after 7 steps", 42),
        ("\\boxed{41}, no: \\boxed{\\frac{42}{1}}", 42),
        ("\\boxed{x = 5}", 5),
        ("so 41 \\boxed{42", 42),
        ("#### 7 \\boxed{8}", 8),
        ("<think>\\boxed{41}</think><answer>42</answer> in 3 steps", 42),
        ("<answer>41 or \\boxed{42} of 50</answer>", 42),
        ("<answer>5 and #### 42 \n 3</answer>", 42),
    ],
)
def test_the_stated_number(text, value):
    number = stated_number(text)
    assert number is not None and number.value == value and not number.percent


@pytest.mark.parametrize("text", ["", "none", "x2", "<answer>none</answer> 5", "\\boxed{} 5", "H2O"])
def test_no_number(text):
    assert stated_number(text) is None


ONE = [
    ("10^6", 1e6),
    ("2^{10}", 1024),
    ("2^{-1}", 0.5),
    ("-2^2", -4),
    ("3.5 x 10^-3", 0.0035),
    ("3.5 \\times 10^{-3}", 0.0035),
    ("6\\cdot10^{23}", 6e23),
    ("1 000 000", 1e6),
    ("-12 345.5", -12345.5),
    ("1,000,000", 1e6),
    ("1{,}234", 1234),
    ("12\\,345", 12345),
    ("\\frac12", 0.5),
    ("\\frac{1}2", 0.5),
    ("\\frac1{20}", 0.05),
    ("-\\frac{3}{4}", -0.75),
    ("2\\frac12", 2.5),
    ("3 123/456", 3 + 123 / 456),
    ("$5$", 5),
    ("$x = 5$.", 5),
    ("90^\\circ", 90),
    ("5 \\text{ cm}^2", 5),
    ("1e3", 1000),
]


@pytest.mark.parametrize(("text", "value"), ONE)
def test_a_box_or_a_reference_that_is_one_number(text, value):
    for number in (
        reference_number(text),
        reference_number(f"12 steps\n#### {text}"),
        stated_number(f"3, \\boxed{{{text}}} or 4"),
    ):
        assert number is not None and number.value == pytest.approx(value, rel=1e-12) and not number.percent


NOT_ONE = (
    r"\sqrt{2} | 2\sqrt{3} | 2:1 | 1.234,56 | 0x10 | 1 2 | 1 0000 | 1,23 | 3, 4 | (1, 2) | 5!"
    r" | 2\pi | 3 million | 3 \text{ million} | 5 \text{ or } 6 | \frac123 | \frac{1}{2}3"
    r" | 5^\frac{1}{2} | 3/4^2 | 2^{x} | 2^3^2 | 2^1.5 | 10-3 | x + 5"
).split(" | ")


@pytest.mark.parametrize("text", NOT_ONE)
def test_texts_that_are_not_one_number_are_refused(tokenizer, text):
    assert stated_number(f"12, so \\boxed{{{text}}}") is None
    for reference in (text, f"12, so \\boxed{{{text}}}", f"12\n#### {text}"):
        with pytest.raises(
            RewardError,
            match=(
                "^reward.column=answer: the reference '.*' is not a single finite number; "
                "correct it, or name another column$"
            ),
        ):
            NumericReward(tokenizer=tokenizer).score_responses(
                responses_of("4", rows=[{"answer": reference}])
            )


def test_percent():
    for text in ("50%", "50 %", "50\\%", "\\boxed{50\\%}"):
        number = stated_number(text)
        assert number is not None and (number.value, number.percent) == (50, True)


def test_boxes_end_at_their_matching_brace():
    assert boxed("a \\boxed{\\text{a {b} c} d} e}") == "\\text{a {b} c} d"
    assert boxed("\\boxed{1} \\boxed{2") is None
    assert boxed("no") is None


@pytest.mark.parametrize(
    ("text", "reference", "settings", "score"),
    [
        ("so 42", "42", {}, 1.0),
        ("so 42.0", 42, {}, 1.0),
        ("so 43", 42, {}, 0.0),
        ("42", "She has 40 + 2 = 42.\n#### 42", {}, 1.0),
        ("1,000", "It takes 3 days\n#### 1000", {}, 1.0),
        ("3/4", 0.75, {}, 1.0),
        ("0.333", "1/3", {}, 0.0),
        ("0.333", "1/3", dict(tolerance=1e-3), 1.0),
        ("1001", 1000, dict(tolerance=1e-3), 1.0),
        ("1002", 1000, dict(tolerance=1e-3), 0.0),
        ("0.001", 0, dict(tolerance=1e-3), 1.0),
        ("50%", "50", {}, 1.0),
        ("50%", "0.5", {}, 1.0),
        ("0.5", "50%", {}, 1.0),
        ("50%", "50%", {}, 1.0),
        ("50%", "5000%", {}, 0.0),
        ("0.5%", "50%", {}, 0.0),
        ("no idea", 3, {}, 0.0),
        ("1/0", 3, {}, 0.0),
        ("7", [5, "7"], {}, 1.0),
        ("6", [5, "7"], dict(score=2.0, miss=-1.0), -1.0),
        ("<answer>7</answer>", "\\boxed{7}", dict(score=2.0, miss=-1.0, inside="answer"), 2.0),
        ("7", 7, dict(inside="answer"), 0.0),
        ("1000000", "10^6", {}, 1.0),
        ("10", "10^6", {}, 0.0),
        ("0", "1 000 000", {}, 0.0),
        ("\\boxed{\\frac12}", 0.5, {}, 1.0),
        ("\\boxed{2\\sqrt{3}}", 3, {}, 0.0),
    ],
)
def test_numeric(tokenizer, text, reference, settings, score):
    reward = NumericReward(**settings, tokenizer=tokenizer)
    assert reward.score_responses(responses_of(text, rows=[{"answer": reference}])).tolist() == [score]


@pytest.mark.parametrize("reference", ["unknown", "1/0", "0^{-1}", "9^{999}", "<answer>none</answer> 4"])
def test_a_reference_without_a_number_stops_the_run(tokenizer, reference):
    with pytest.raises(
        RewardError, match="^reward.column=answer: the reference .* is not a single finite number"
    ):
        NumericReward(tokenizer=tokenizer).score_responses(responses_of("4", rows=[{"answer": reference}]))


@pytest.mark.parametrize(
    "unit",
    (
        r"1 | 1,234 | 123, | # | #### | ####  | \boxed{ | \frac{1 | \frac{1}{ |   | 1  | {"
        r" | <answer> | 1. | 1/ | - | $  | 1e | % | 1^ | 1 000  | 123  | \frac1 | ####1 | 2 x 10^"
    ).split(" | "),
)
def test_long_odd_responses_are_parsed_in_linear_time(unit):
    text = "7 " + unit * (300_000 // len(unit))
    for read, given in ((stated_number, text), (reference_number, text), (stated_number, boxes(text))):
        with cpu_limit(QUADRATIC):
            read(given)


def boxes(text):
    return f"\\boxed{{{text}}}"
