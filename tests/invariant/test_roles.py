"""Tests the initial weights, placement and saved files of the four roles against plain transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.invariant import plain_ppo
from tests.invariant.invariant_cases import tiered
from tests.invariant.invariant_runs import Launches, Run


def rows(experience: dict[str, Tensor]) -> list[plain_ppo.Row]:
    """Returns the rows without padding."""
    kept = zip(
        experience["ids"], experience["attention_mask"], experience["response_mask"].sum(1), strict=True
    )
    return [(ids[mask], int(n)) for ids, mask, n in kept]


def states(experience: dict[str, Tensor]) -> Tensor:
    """Returns a bool mask [B,S] of the states before each token of the answer and after the last token."""
    mask = experience["response_mask"]
    return torch.arange(mask.shape[1] + 1) <= mask.sum(1, keepdim=True)


def assert_rows_close(padded: Tensor, mask: Tensor, expected: list[Tensor], atol: float = 1e-5) -> None:
    assert len(padded) == len(expected)
    for got, kept, want in zip(padded, mask, expected, strict=True):
        torch.testing.assert_close(got[kept], want, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["replicated", "offloaded"])
@torch.no_grad()
def test_a_reference_gives_the_same_log_probs_wherever_it_is(runs: Launches, where: str) -> None:
    experience = runs[f"2/{where} reference"].experience("first")
    other = plain_ppo.language_model(runs.root / "other")
    expected = [plain_ppo.logprobs(other, row)[0] for row in rows(experience)]
    assert_rows_close(experience["ref_logprobs"], experience["response_mask"], expected)
    assert (
        experience["ref_logprobs"] - experience["logprobs"]
    ).abs().max() > 1  # the test is meaningful only if the reference differs from the actor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1/zero0", "2/zero3"])
@torch.no_grad()
def test_a_critic_from_a_reward_model_starts_with_its_scores(runs: Launches, name: str) -> None:
    """Checks critic.init=auto: the value of each state is the reward model's score of the text so far."""
    experience = runs[f"{name} critic from reward"].experience("first")
    scorer = plain_ppo.score_model(runs.root / "scorer")
    expected = [plain_ppo.states(scorer, row) for row in rows(experience)]
    assert_rows_close(experience["values"], states(experience), expected)
    assert experience["values"].abs().max() > 0.1
    if name == "2/zero3":  # the reward model is sharded too, and scores like a replica on one rank
        torch.testing.assert_close(
            experience["scores"],
            runs["1/zero0 critic from reward"].experience("first")["scores"],
            rtol=0,
            atol=1e-5,
        )


@pytest.mark.slow
def test_a_critic_from_the_actor_starts_at_zero_and_learns(runs: Launches) -> None:
    run = runs["2/zero3 critic from actor"]
    assert not run.experience("first")["values"].any()
    assert run.tensors["trained_values"].abs().max() > 1e-3


@pytest.mark.parametrize("name", tiered(["2/zero2 bf16", "2/zero3 bf16", "2/zero3 tied bf16", "2/zero3"]))
def test_rope_frequencies_stay_in_fp32(runs: Launches, name: str) -> None:
    exact = runs["1/zero0"].found["rotary"]["actor"]["values"]
    found = runs[name].found["rotary"]
    assert ("twin" in found) == ("zero3" in name)
    for model, buffer in found.items():
        assert buffer["dtype"] == "torch.float32", model
        assert buffer["values"] == exact, model


EXPORTS = [f"2/zero{stage}" for stage in range(4)]
EXPORTS += ["2/zero2 bf16", "2/zero3 bf16", "1/zero0 tied", "2/zero3 tied", "2/zero3 tied bf16"]


def check_export(run: Run, tied: bool, dtype: torch.dtype) -> None:
    lm, info = AutoModelForCausalLM.from_pretrained(run.folder / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert lm.dtype == dtype
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == tied
    weights = run.weights("actor")
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight.float(), weights[f"lm.{name}"]), name
    experience = run.experience("last")
    ids, mask, n = experience["ids"], experience["attention_mask"], experience["response_mask"].shape[1]
    logits = lm(
        input_ids=ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    ).logits.float()
    assert logits[mask].std() > 0.5
    torch.testing.assert_close(
        logits[mask],
        run.tensors["trained_logits"][mask],
        rtol=0,
        atol=1e-5 if dtype is torch.float32 else 2e-2,
    )
    logprobs = logits[:, -n - 1 : -1].log_softmax(-1).gather(2, ids[:, -n:, None])[..., 0]
    kept = experience["response_mask"]
    bound = (
        1e-5 if dtype is torch.float32 else 0.1
    )  # in bf16 the head runs over other rows, and so rounds differently
    torch.testing.assert_close(logprobs[kept], run.tensors["trained_logprobs"][kept], rtol=0, atol=bound)


def check_exported_critic(run: Run, dtype: torch.dtype) -> None:
    model, info = AutoModelForSequenceClassification.from_pretrained(
        run.folder / "critic", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == dtype and model.config.num_labels == 1
    weights = run.weights("critic")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.float(), weights[f"model.{name}"]), name
    experience = run.experience("last")
    bound = 1e-5 if dtype is torch.float32 else 0.05
    expected = [plain_ppo.states(model, row).float() for row in rows(experience)]
    assert_rows_close(run.tensors["trained_values"], states(experience), expected, bound)


@pytest.mark.parametrize("name", tiered(EXPORTS))
@torch.no_grad()
def test_what_is_saved_is_what_was_trained(runs: Launches, name: str) -> None:
    """Loads the saved files with plain transformers and compares weights, ties and logits."""
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    check_export(runs[name], tied="tied" in name, dtype=dtype)
    check_exported_critic(runs[name], dtype)
