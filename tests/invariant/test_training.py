"""Tests that results depend on neither the number of ranks, nor the ZeRO stage, nor the split into forwards.

Generation is replayed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_ds.models.tokenizer import load_tokenizer
from tests.invariant import invariant_assets, plain_ppo
from tests.invariant.invariant_cases import ALGORITHMS, tiered
from tests.invariant.invariant_runs import Launches, Run
from tests.invariant.mistakes import MISTAKES

RELATIVE = 1e-5  # tolerance of losses, norms, KL and other metrics in fp32
ABSOLUTE = 2e-6  # for metrics near 0, which are what remains after larger terms cancel
WEIGHTS = 1e-5  # tolerance after 12 steps of AdamW, which move weights by about 1e-2

PLAIN = [f"1/{label}" for label in ("zero3", "zero0 row by row", "zero0 packed")] + [
    f"2/{label}"
    for label in (
        *("zero0", "zero1", "zero2", "zero3", "zero3 row by row", "zero3 packed"),
        *("zero2 offloaded", "zero3 all offloaded"),
    )
]


def sample_gaps(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Returns descriptions of the differences between sample rows, whose numbers have four decimals."""
    found = []
    for i, (row, other) in enumerate(zip(rows, others, strict=True)):
        columns, other_columns = row["tokens"], other["tokens"]
        assert columns.keys() == other_columns.keys() >= {"text", "ids", "logprobs", "advantages", "rewards"}
        for name in ("prompt_id", "response", "score"):
            if row[name] != other[name]:
                found.append(f"row {i}: {name} {row[name]} {other[name]}")
        for name, column in columns.items():
            expected = other_columns[name]
            if name not in ("text", "ids"):
                expected = pytest.approx(expected, rel=1e-4, abs=3e-4)
            if column != expected:
                found.append(f"row {i}: {name} {column} {other_columns[name]}")
    return found


def gaps(a: Run, b: Run, weights_within: float = WEIGHTS) -> list[str]:
    """Returns descriptions of the differences that exceed rounding."""
    found = []
    for one, other in zip(a.steps, b.steps, strict=True):
        assert one.keys() == other.keys()
        step = int(one["step"])
        for name, x in one.items():
            # log-probs that differ only by rounding: these metrics are noise
            near = 1e-4 if name.startswith("parity/logp") else ABSOLUTE
            if not math.isclose(x, other[name], rel_tol=RELATIVE, abs_tol=near):
                found.append(f"step {step}: {name} {x} {other[name]}")
        found += [f"step {step}: {gap}" for gap in sample_gaps(a.samples(step), b.samples(step))]
    for role, norms in a.found["norms"].items():
        pairs = enumerate(zip(norms, b.found["norms"][role], strict=True))
        found += [
            f"optimizer step {i}: {role} norm {x} {y}"
            for i, (x, y) in pairs
            if not math.isclose(x, y, rel_tol=RELATIVE)
        ]
        weights, others = a.weights(role), b.weights(role)
        assert weights.keys() == others.keys()
        moved = {name: float((weight - others[name]).abs().max()) for name, weight in weights.items()}
        found += [
            f"{role} weight {name} by {gap}" for name, gap in moved.items() if not gap <= weights_within
        ]
    return found


def test_the_rollouts_are_as_uneven_as_they_should_be(runs: Launches) -> None:
    for rows in plain_ppo.recorded(runs.root / "rollouts.safetensors"):
        assert len(rows) == 16
        assert len({len(ids) - n for ids, n in rows}) > 3  # prompts of different lengths
        assert {n for _, n in rows} >= {1, 10}  # answers of one token and of the maximum length
    run = runs["1/zero0"]
    assert all(0 < step["rollout/truncated_frac"] < 1 for step in run.steps)
    assert all(
        step["policy/clipfrac"] > 0 and step["policy/grad_norm"] > 1 for step in run.steps
    )  # ratios and gradients are both clipped
    assert len(run.found["norms"]["actor"]) == len(run.found["norms"]["critic"]) == 12


def test_training_equals_ppo_in_plain_torch(runs: Launches) -> None:
    tokenizer = load_tokenizer(str(runs.root / "actor"))

    def score(prompt: list[int], response: list[int]) -> float:
        return invariant_assets.score([tokenizer.decode(prompt)], [tokenizer.decode(response)], [{}])[0]

    expected = plain_ppo.train(runs.root, score)
    for name in ("1/zero0", "2/zero0", "2/zero3"):
        for role, prefix in (("actor", "lm."), ("critic", "model.")):
            assert runs[name].found["norms"][role] == pytest.approx(expected["norms"][role], rel=RELATIVE), (
                name,
                role,
            )
            weights = runs[name].weights(role)
            for key, weight in expected[role].state_dict().items():
                torch.testing.assert_close(
                    weights[prefix + key], weight, rtol=0, atol=WEIGHTS, msg=f"{name} {role} {key}"
                )


@pytest.mark.parametrize("name", tiered(PLAIN))
def test_ranks_stages_and_micro_batches_change_nothing(runs: Launches, name: str) -> None:
    assert gaps(runs["1/zero0"], runs[name]) == []


@pytest.mark.parametrize("name", tiered(["1/zero0 packed", "2/zero3 packed"]))
def test_what_is_packed_has_no_padding(runs: Launches, name: str) -> None:
    def shares(name: str) -> list[float]:
        return [json.loads(line)["perf/pad_frac_update"] for line in runs[name].metrics.splitlines()]

    assert all(share > 0 for share in shares("1/zero0")) and not any(shares(name))


def assert_checkpointed(plain: Run, checkpointed: Run) -> None:
    assert gaps(plain, checkpointed) == []
    for role, runs in plain.found["layer_runs"].items():
        assert checkpointed.found["layer_runs"][role] == 2 * runs > 0, role


@pytest.mark.slow
def test_gradient_checkpointing_is_active_and_changes_nothing(runs: Launches) -> None:
    assert_checkpointed(runs["1/zero0"], runs["1/zero0 checkpointed"])
    assert_checkpointed(runs["2/zero3"], runs["2/zero3 checkpointed"])


@pytest.mark.slow
def test_other_losses_do_not_depend_on_ranks_either(runs: Launches) -> None:
    """Covers sequence means, the KL in the loss, and no whitening."""
    expected = runs["1/zero0 other aggregation"]
    assert gaps(expected, runs["2/zero2 other aggregation"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nor_do_other_algorithms(runs: Launches, algorithm: str) -> None:
    assert gaps(runs[f"1/zero0 {algorithm}"], runs[f"2/zero3 {algorithm}"], weights_within=1e-6) == []


@pytest.mark.slow
def test_the_other_algorithms_are_at_work(runs: Launches) -> None:
    steps = {name: runs[f"1/zero0 {name}"].steps[0] for name in ALGORITHMS}
    has_values = {name: "value/loss" in step for name, step in steps.items()}
    assert has_values == dict.fromkeys(ALGORITHMS, True) | {"grpo": False}
    assert {name: "critic" in runs[f"1/zero0 {name}"].found["norms"] for name in steps} == has_values | {
        "one trunk": False
    }
    assert steps["kl in the loss"]["policy/kl_loss"] > 0.1 and steps["grpo"]["reward/kl_penalty_mean"] != 0
    assert all(len(runs[f"1/zero0 {name}"].found["norms"]["actor"]) == 4 for name in steps)
    timed = {name: "time/old_logprobs" in runs[f"1/zero0 {name}"].metrics for name in steps}
    assert timed == dict.fromkeys(ALGORITHMS, True) | {"decoded log-probs": False}
    one = runs["2/zero3 one trunk"]
    assert (
        one.experience("first")["values"].abs().max() == 0 < 1e-3 < one.tensors["trained_values"].abs().max()
    )
    whole = runs["1/zero0 whole answers"].experience("first")
    assert torch.equal(
        whole["value_mask"].nonzero()[:, 1], torch.zeros(16, dtype=torch.long)
    )  # only V(prompt) is trained


@pytest.mark.slow
def test_tied_embeddings_train_alike(runs: Launches) -> None:
    assert gaps(runs["1/zero0 tied"], runs["2/zero3 tied"]) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_these_comparisons_notice(runs: Launches, mistake: str) -> None:
    found = gaps(runs["1/zero0"], runs[f"2/{mistake}"])
    assert any("norm" in line for line in found) and any("weight" in line for line in found), found
    norms, others = runs["1/zero0"].found["norms"]["actor"], runs[f"2/{mistake}"].found["norms"]["actor"]
    # the difference is far above rounding
    assert max(abs(x / y - 1) for x, y in zip(norms, others, strict=True)) > 0.01


@pytest.mark.parametrize("name", tiered(["1/zero0", *PLAIN]))
def test_the_first_ratio_is_one_and_the_policy_starts_as_its_reference(runs: Launches, name: str) -> None:
    run = runs[name]
    assert [step["parity/ratio_first_minibatch_max"] for step in run.steps] == pytest.approx(
        [1, 1, 1], abs=1e-5
    )
    # over all minibatches; the policy is unchanged only in the first
    assert run.steps[0]["policy/ratio_max"] > 1.1
    for metric in ("kl/ref_seq_mean", "kl/ref_token_mean", "kl/ref_token_max", "kl/k3_token_mean"):
        assert run.steps[0][metric] == pytest.approx(0, abs=1e-5), metric
    # After four updates the policy is far from the reference. k3 is a mean of terms that are never negative;
    # terms of the other estimates can cancel, depending on the sampled answers.
    assert all(step["kl/k3_token_mean"] > 1e-2 for step in run.steps[1:])


# Metrics before the first update; later ones contain bf16's rounding of weights.
AT_THE_START = ("reward/score_mean", "value/pred_mean", "value/return_mean", "adv/std", "adv/max_abs")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_trains_alike(runs: Launches, stage: int) -> None:
    run, exact = runs[f"2/zero{stage} bf16"], runs["1/zero0"]
    assert all(math.isfinite(x) for step in run.steps for x in step.values())
    assert all(step["health/skipped_steps"] == 0 for step in run.steps)
    for metric in AT_THE_START:
        assert run.steps[0][metric] == pytest.approx(exact.steps[0][metric], rel=0.03, abs=0.01), metric
    assert run.steps[0]["kl/ref_token_max"] < 0.1 and run.steps[0][
        "parity/ratio_first_minibatch_max"
    ] == pytest.approx(1, abs=0.1)
    for role, start in (("actor", "actor"), ("critic", "scorer")):
        assert run.found["norms"][role][0] == pytest.approx(exact.found["norms"][role][0], rel=0.05)
        assert {x.dtype for name, x in run.tensors.items() if name.startswith(f"{role}/")} == {torch.bfloat16}
        assert_moved_alike(run, exact, role, runs.root / start)


def assert_moved_alike(run: Run, exact: Run, role: str, start: Path) -> None:
    """Asserts that the weights as one vector moved in about the same direction and as far as in fp32."""
    prefix = {"actor": "lm.", "critic": "model."}[role]
    model = plain_ppo.language_model(start) if role == "actor" else plain_ppo.score_model(start)
    before = torch.cat([weight.flatten() for weight in model.state_dict().values()])
    moves = [
        torch.cat([r.weights(role)[prefix + name].flatten() for name in model.state_dict()]) - before
        for r in (run, exact)
    ]
    assert torch.cosine_similarity(*moves, dim=0) > 0.9
    assert moves[0].norm() == pytest.approx(float(moves[1].norm()), rel=0.1)
