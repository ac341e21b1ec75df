"""Tests that generation mode gathers and releases weights, even if its block raises.

Ranks decode independently and draw different samples.
"""

from __future__ import annotations

import pytest
import torch

from tests.invariant.invariant_runs import Launches, Run

pytestmark = pytest.mark.slow  # its runs are not in CORE


def answers(run: Run) -> list[tuple[str, str, int, str]]:
    """Returns all answers of all steps, in order."""
    return [
        (row["prompt"], row["response"], row["length"], row["finish"])
        for step in (1, 2, 3)
        for row in run.samples(step)
    ]


GREEDY = (
    *("1/zero0 greedy hf", "1/zero0 greedy", "2/zero3 greedy"),
    *("2/zero3 greedy row by row", "2/zero3 greedy layers"),
)


def test_greedy_answers_depend_on_neither_backends_nor_ranks_nor_stages_nor_chunks(runs: Launches) -> None:
    expected = answers(runs[GREEDY[0]])
    assert (
        len(expected) == 48 and len(set(expected)) > 12
    )  # prompts differ between steps, and answers change as the policy learns
    for name in GREEDY:
        assert answers(runs[name]) == expected, name


def test_what_was_generated_has_the_log_probs_of_the_training_engine(runs: Launches) -> None:
    for name in GREEDY:
        assert max(step["parity/logp_abs_diff_max"] for step in runs[name].steps) < 1e-4, name


def test_a_resumed_run_draws_what_it_would_have_drawn(runs: Launches) -> None:
    """Compares answers, metrics and weights bit for bit."""
    whole, resumed = runs["2/zero0 hf drawn"], runs["2/zero0 hf resumed"]
    assert len(whole.steps) == 3 and whole.steps[1:] == resumed.steps
    assert [whole.samples(step) for step in (2, 3)] == [resumed.samples(step) for step in (2, 3)]
    assert whole.samples(2) != whole.samples(3)
    for name in (
        "trained_logits",
        *(name for name in whole.tensors if name.startswith(("actor/", "critic/", "last/"))),
    ):
        assert torch.equal(whole.tensors[name], resumed.tensors[name]), name


def test_ranks_decode_different_numbers_of_tokens(runs: Launches) -> None:
    """Inside generation mode no rank waits for the others, even with ZeRO-3."""
    first, second = runs["2/zero3 greedy row by row"].found["forwards"]
    assert first != second and min(first, second) > 0


def test_layer_by_layer_they_go_in_step_and_train_the_same_weights(runs: Launches) -> None:
    whole, layers = runs["2/zero3 greedy"], runs["2/zero3 greedy layers"]
    first, second = layers.found["forwards"]
    assert first == second > 0 and len(set(whole.found["forwards"])) == 2
    for role in ("actor", "critic"):
        for name, weight in whole.weights(role).items():
            assert torch.allclose(weight, layers.weights(role)[name], atol=1e-5), name


def test_ranks_draw_different_samples_of_the_same_prompt(runs: Launches) -> None:
    rows = runs["2/zero3 same prompt"].samples(1)
    assert [row["prompt"] for row in rows] == 8 * ["feed"]
    assert len({row["response"] for row in rows}) == 8, rows


def assert_undisturbed(plain: Run, disturbed: Run) -> None:
    """Asserts bit-identical results: generation must not affect training."""
    assert disturbed.steps == plain.steps
    assert disturbed.found["norms"] == plain.found["norms"]
    for name in plain.tensors:
        assert torch.equal(plain.tensors[name], disturbed.tensors[name]), name
    for rank in disturbed.found["seen"]:
        # per step: an exception on all ranks, an exception on one rank, and entry while active
        assert len(rank) == 9 and all(all(state.values()) for state in rank), rank
        assert [sorted(state) for state in rank[:3]] == 2 * [
            ["emptied", "refused outside", "released", "train"]
        ] + [["eval", "filled"]]


def test_an_exception_inside_leaves_nothing_behind(runs: Launches) -> None:
    assert_undisturbed(runs["2/zero3"], runs["2/zero3 disturbed"])
