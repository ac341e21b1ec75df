"""Tests whole runs with adapters on actor and critic.

The results are the same for every ZeRO stage and number of ranks; the base weights do not change.
"""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from tests.invariant import plain_ppo
from tests.invariant.invariant_runs import Launches
from tests.invariant.test_training import assert_checkpointed, gaps

pytestmark = pytest.mark.slow  # its runs are not in CORE

ON_TWO = ["2/zero3 lora", "2/zero3 lora checkpointed", "2/zero2 lora row by row"]
EVERY = pytest.mark.parametrize("name", ["1/zero0 lora", *ON_TWO])


@pytest.mark.parametrize("name", ON_TWO)
def test_ranks_stages_and_micro_batches_change_nothing(runs: Launches, name: str) -> None:
    assert gaps(runs["1/zero0 lora"], runs[name]) == []


def test_gradient_checkpointing_is_active_on_a_frozen_base(runs: Launches) -> None:
    assert_checkpointed(runs["2/zero3 lora"], runs["2/zero3 lora checkpointed"])


@EVERY
def test_a_run_starts_as_one_without_adapters_at_a_kl_of_exactly_0(runs: Launches, name: str) -> None:
    run, plain = runs[name].experience("first"), runs["1/zero0"].experience("first")
    for what in ("logprobs", "ref_logprobs", "values"):
        torch.testing.assert_close(run[what], plain[what], rtol=0, atol=1e-5)
    steps = runs[name].steps
    assert steps[0]["kl/ref_token_max"] == 0 < 1e-2 < abs(steps[2]["kl/ref_seq_mean"])
    assert [step["parity/ratio_first_minibatch_max"] for step in steps] == pytest.approx([1, 1, 1], abs=1e-5)
    assert steps[0]["policy/lr"] == pytest.approx(
        3 * steps[0]["value/lr"]
    )  # the actor's adapters have their own learning rate


@EVERY
def test_the_reference_stays_the_base(runs: Launches, name: str) -> None:
    """Recomputes the last rollout with plain transformers, from the model folder that the run loaded."""
    experience, lm = runs[name].experience("last"), plain_ppo.language_model(runs.root / "actor")
    kept = zip(
        experience["ids"],
        experience["attention_mask"],
        experience["response_mask"],
        experience["ref_logprobs"],
        strict=True,
    )
    with torch.no_grad():
        for ids, attended, answered, found in kept:
            expected = plain_ppo.logprobs(lm, (ids[attended], int(answered.sum())))[0]
            torch.testing.assert_close(found[answered], expected, rtol=0, atol=1e-5)
    assert (experience["ref_logprobs"] - experience["logprobs"]).abs().max() > 0.1


@EVERY
def test_the_base_keeps_every_bit(runs: Launches, name: str) -> None:
    for role, prefix, folder in (("actor", "lm.", "actor"), ("critic", "model.", "scorer")):
        start = load_file(runs.root / folder / "model.safetensors")
        trained = {
            key.removeprefix(prefix).replace(".base_layer.", "."): x
            for key, x in runs[name].weights(role).items()
        }
        assert {key for key, x in start.items() if not torch.equal(trained[key], x)} == (
            {"score.weight"} if role == "critic" else set()
        )
        ups = [x for key, x in trained.items() if ".lora_B." in key]
        assert len(ups) == 14 and all(x.abs().max() > 1e-3 for x in ups)


@pytest.mark.parametrize("name", ["1/zero0 lora", "2/zero3 lora"])
@torch.no_grad()
def test_a_run_leaves_the_merged_model_and_the_adapter(runs: Launches, name: str) -> None:
    run, experience = runs[name], runs[name].experience("last")
    on_base = PeftModel.from_pretrained(plain_ppo.language_model(runs.root / "actor"), run.folder / "adapter")
    merged, critic = (
        plain_ppo.language_model(run.folder / "model"),
        plain_ppo.score_model(run.folder / "critic"),
    )
    for row in range(4):
        ids, n = (
            experience["ids"][row][experience["attention_mask"][row]],
            int(experience["response_mask"][row].sum()),
        )
        trained, values = (run.tensors[what][row][:n] for what in ("trained_logprobs", "trained_values"))
        for lm in (merged, on_base):
            torch.testing.assert_close(plain_ppo.logprobs(lm, (ids, n))[0], trained, rtol=0, atol=1e-5)
        torch.testing.assert_close(plain_ppo.values(critic, (ids, n)), values, rtol=0, atol=1e-5)
