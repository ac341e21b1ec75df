"""Tests make_experience on stubs: token rewards, advantages and metrics, computed by hand."""

import pytest
import torch

from ppo_ds.ppo.collector import scored
from ppo_ds.types import Rollout, Scores
from tests.ppo.algo_cases import Stub, maker, rounded


def scored_rollout(rollout, scores, per_token=0.0, **components):
    """Makes a scored rollout from a rollout and these scores."""
    tokens = torch.full(rollout.response_mask.shape, per_token).masked_fill(~rollout.response_mask, 0.0)
    return scored(
        rollout,
        Scores(
            torch.tensor(scores), tokens, {name: torch.tensor(column) for name, column in components.items()}
        ),
    )


@pytest.fixture
def answered():
    """Makes responses [1 2] and [3 4 5] to prompts of 2 and 1 tokens.

    The second is truncated at the limit; the padding holds token 9.
    """
    ids = torch.tensor([[8, 8, 1, 2, 9], [9, 8, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    logprobs = torch.tensor([[-0.1, -0.2, 0.0], [-0.3, -0.4, -0.8]])
    return Rollout(
        ids, mask, mask[:, 2:], torch.tensor([True, False]), torch.tensor([3, 3]), logprobs, ({}, {})
    )


@pytest.fixture
def rollout(answered):
    return scored_rollout(answered, [1.0, -2.0])


def test_by_hand(world, rollout):
    """log pi_ref is log pi - 0.2, so k1 is 0.2 and costs 0.1 per token with the coefficient 0.5."""
    experience, seen = maker(world)(rollout, 0.5)
    assert rounded(experience.logprobs) == [[-0.1, -0.2, 0], [-0.3, -0.4, -0.5]]
    assert rounded(experience.ref_logprobs) == [[-0.3, -0.4, 0], [-0.5, -0.6, -0.7]]
    assert torch.equal(experience.old_logprobs, experience.logprobs)
    # V of the state before each token and of the last state
    assert rounded(experience.values) == [[1, 2, 6, 0], [3, 4, 5, 6]]
    assert rounded(experience.rewards) == [[-0.1, 0.9, 0, 0], [-0.1, -0.1, -2.1, 0]]
    assert rounded(experience.returns) == [[0.8, 0.9, 0, 0], [-2.3, -2.2, -2.1, 0]]
    assert experience.value_mask.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert experience.weights.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert rounded(experience.advantages) == [[-0.2, -1.1, 0], [-5.3, -6.2, -7.1]]
    assert experience.scores.tolist() == [1.0, -2.0] and experience.finished.tolist() == [True, False]
    assert torch.equal(experience.ids, rollout.ids) and torch.equal(
        experience.response_mask, rollout.response_mask
    )
    assert seen["adv/mean"] == pytest.approx(-19.9 / 5) and seen["adv/max_abs"] == pytest.approx(7.1)
    # population std of -0.2, -1.1, -5.3, -6.2 and -7.1
    assert seen["adv/std"] == pytest.approx(2.7924, abs=1e-4)
    assert torch.equal(experience.decode_logprobs, rollout.logprobs)
    assert seen["reward/total_mean"] == pytest.approx((0.8 - 2.3) / 2) and seen["reward/clipped_frac"] == 0.0
    assert seen["reward/kl_penalty_mean"] == pytest.approx(-(0.2 + 0.3) / 2)


def test_token_scores_and_components(world, answered):
    rollout = scored_rollout(answered, [1.0, -2.0], per_token=0.25, style=[1.0, 2.0], truth=[0.0, 1.0])
    experience, seen = maker(world, reference=Stub())(rollout, 0.5)
    assert rounded(experience.rewards) == [[0.25, 1.25, 0, 0], [0.25, 0.25, -1.75, 0]]
    assert (seen["reward/component/style_mean"], seen["reward/component/truth_mean"]) == (1.5, 0.5)


def test_padding_is_zero_for_any_model_output(world, rollout):
    experience, _ = maker(world)(rollout, 0.5)
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "advantages"):
        assert getattr(experience, name)[~rollout.response_mask].tolist() == [0.0], name
    for name in ("rewards", "returns"):
        assert getattr(experience, name)[~experience.value_mask].tolist() == [0.0] * 3, name
    assert experience.values[0, 3] == 0


def test_the_reference_is_resident_only_while_it_scores(world, rollout):
    class Moving(Stub):
        def __call__(self, *args):
            seen.append(self.is_resident)
            return super().__call__(*args)

    seen, reference = [], Moving()
    maker(world, reference=reference, token_budget=1)(rollout, 0.5)
    assert seen == [True, True] and not reference.is_resident
