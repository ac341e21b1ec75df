"""Tests console output: plain lines in a log file, a live view on a terminal, any text."""

import io
import math

import pytest
from rich.text import Text

from ppo_ds.distributed import heartbeat
from ppo_ds.tracking.console import ConsoleTracker, step_line
from ppo_ds.tracking.curves import before_after
from ppo_ds.tracking.formatting import format_change, format_duration, format_number
from ppo_ds.tracking.screen import Screen

METRICS = {
    "reward/score_mean": 0.5, "reward/score_std": 0.25, "kl/ref_seq_mean": 0.0123, "policy/loss": -0.02,
    "value/loss": 0.4, "perf/tokens_per_s": 1234.4, "time/step": 2.5,
    "eval/accuracy": 0.715, "eval/score_mean": 0.3,
}  # fmt: skip


def run(stream):
    tracker = ConsoleTracker("ppo", 20, activity=heartbeat.read, screen=Screen(stream))
    tracker.banner("batch  8 prompts x 4 samples [per step]")
    tracker.start({})
    tracker.log(3, METRICS)
    tracker.finish({"exit_reason": "done", "wall_s": 61.0})


def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    run(stream)
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["ppo_ds", "batch  8 prompts x 4 samples [per step]"]
    assert lines[2].split() == (
        (
            "step 3/20 reward 0.500 ± 0.250 kl 0.0123 loss -0.0200 value loss 0.4000 1234 tok/s "
            "2.50 s accuracy 71.5%"
        ).split()
    )
    assert lines[3:] == ["done after 1 min 01 s"]


def test_missing_and_nonfinite_metrics():
    assert step_line(1, 9, {"policy/loss": None, "eval/score_mean": 0.3}).split() == (
        "[bold]step 1/9[/] [dim]loss[/] - [bold cyan]held out 0.300[/]".split()
    )
    assert step_line(1, 9, {}) == "[bold]step 1/9[/]"
    bare, full = (step_line(1, 9, {"reward/score_mean": 1.0, "reward/score_std": std}) for std in (None, 0.5))
    assert "± -" in bare and "± 0.500" in full


def test_steps_of_the_other_stages() -> None:
    sft = {"sft/loss": 1.5, "sft/token_accuracy": 0.625, "eval/loss": 1.25, "eval/perplexity": 3.49034}
    assert step_line(2, 9, sft).split() == (
        "[bold]step 2/9[/] [dim]loss[/] 1.5000 [dim]token accuracy[/] 62.5% "
        "[bold cyan]held-out loss 1.250, perplexity 3.490[/]".split()
    )
    pairs = {"rm/loss": 0.5, "rm/accuracy": 0.75, "rm/margin_mean": -0.125, "eval/accuracy": 0.5}
    assert step_line(2, 9, pairs | {"eval/score_mean": 3.0}).split() == (
        "[bold]step 2/9[/] [dim]loss[/] 0.5000 [dim]accuracy[/] 75.0% [dim]margin[/] -0.125 "
        "[bold cyan]held-out accuracy 50.0%[/]".split()
    )


def test_an_ascii_log_survives_any_text():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run(stream)
    before_after(
        {}, [{"prompt": "重力是什么", "before": "é", "after": "🙂", "score": 1.0}], {}, stream=stream
    )
    stream.flush()
    assert b"0.500 +- 0.250" in raw.getvalue() and b"?????" in raw.getvalue()


def test_a_narrow_terminal_gets_the_most_important_numbers() -> None:
    lines = {
        columns: Text.from_markup(step_line(3, 20, METRICS, columns=columns)).plain
        for columns in (None, 140, 80, 60, 40, 5)
    }
    assert all(len(line) <= columns for columns, line in lines.items() if columns and columns > 5)
    assert lines[None].split() == lines[140].split() and lines[5] == "step  3/20"
    assert lines[40].split() == "step 3/20 reward 0.500 ± 0.250".split()
    assert lines[60].split() == [*lines[40].split(), "accuracy", "71.5%"]
    assert lines[80].split() == "step 3/20 reward 0.500 ± 0.250 kl 0.0123 2.50 s accuracy 71.5%".split()


ROUNDED = [
    (0.5325, ".1%", "53.3%"), (0.4775, ".1%", "47.8%"), (0.4775, ".3f", "0.478"), (-0.0625, ".3f", "-0.063"),
    (0.47749999165534973, ".3f", "0.478"), (0.4774, ".3f", "0.477"), (2.5, "6.0f", "     3"),
    (None, "7.3f", "      -"), (math.inf, ".3f", "inf"), (1e300, ".0f", f"{1e300:.0f}"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "form", "text"), ROUNDED)
def test_halves_are_rounded_up_as_in_the_pages(value, form, text):
    assert format_number(value, form) == text


def test_a_change_is_the_difference_of_the_numbers_that_are_shown():
    """The exact change of the first is 5.5 points, and 47.8% to 53.2% are 5.4."""
    assert format_change(0.47751, 0.53249, percent=True) == "+5.4 points"
    assert format_change(0.2516, 0.7274, percent=False) == "+0.475"
    assert format_change(2.0, 1.5, percent=False) == "-0.500"


def test_answers_are_printed_without_their_control_characters() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker("ppo", 20, activity=heartbeat.read, print_answers=2, screen=Screen(stream))
    rows = [{"prompt": "1+1=\nHow much?", "response": "2\x1b[31m\r3\n[bold]", "score": 0.5}, {"prompt": "no"}]
    for step in (1, 2, 3):
        tracker.samples(step, rows)
    tracker.samples(4, [{"prompt": "p", "response": "r"}], split="eval")
    assert stream.getvalue().splitlines() == [
        *("step 2, sample, score 0.500", "  prompt  1+1=", "          How much?"),
        *("  answer  2\\x1b[31m\\r3", "          [bold]"),
        *("step 4, held out", "  prompt  p", "  answer  r"),
    ]


def test_format_duration():
    assert [format_duration(value) for value in (None, 4.21, 185, 7620)] == [
        "an unknown time",
        "4.2 s",
        "3 min 05 s",
        "2 h 07 min",
    ]
