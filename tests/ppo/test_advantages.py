"""Tests the position of the score, the states, and the resulting advantages.

The numbers are computed by hand or by plain loops over lists.
"""

from dataclasses import replace

import pytest
import torch

from ppo_ds.algorithm.credit.positions import ScorePosition
from tests.ppo.algo_cases import answers, critic_free, gae, rounded

SCORES = [1.0, 2.0, 3.0, 4.0, 5.0]


def rows():
    """Makes five responses: one shorter than its limit, one at its limit with an end token, one at its limit
    without it, one at the overall limit, and an empty one.

    The empty response consists of an end token that is not an action.
    """
    return answers([2, 1, 2, 3, 0], SCORES, finished=[True, True, False, False, True], limits=[3, 1, 2, 3, 3])


def paid(place, rollout, kl=0.5, coef=0.2, token_score=0.0):
    """Returns the rewards for a KL of ``kl`` and a score of ``token_score`` on each token."""
    mask = rollout.response_mask
    kl, tokens = (
        torch.full(mask.shape, kl).masked_fill(~mask, 0.0),
        torch.full(mask.shape, token_score).masked_fill(~mask, 0.0),
    )
    return place.rewards(rollout.scores, coef * kl, replace(rollout, token_scores=tokens))


ON_LAST = [[-0.1, 0.9, 0, 0], [1.9, 0, 0, 0], [-0.1, 2.9, 0, 0], [-0.1, -0.1, 3.9, 0], [0, 0, 0, 0]]
ON_NEXT = [[-0.1, -0.1, 1, 0], [1.9, 0, 0, 0], [-0.1, 2.9, 0, 0], [-0.1, -0.1, 3.9, 0], [5, 0, 0, 0]]
ACTIONS = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
# ACTIONS and one further position where the limit allows it
ONE_MORE = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("next_state", ["trained", "untrained", "ignored"])
def test_the_score_on_the_last_token(next_state):
    """A response without an action has no position for the score, so its rewards are 0."""
    place = ScorePosition("last_token", next_state)
    assert rounded(paid(place, rows())) == ON_LAST
    assert place.states(rows()).int().tolist() == place.trained(rows()).int().tolist() == ACTIONS


@pytest.mark.parametrize(
    ("next_state", "states", "trained"),
    [("trained", ONE_MORE, ONE_MORE), ("untrained", ONE_MORE, ACTIONS), ("ignored", ACTIONS, ACTIONS)],
)
def test_the_score_on_the_position_after_the_last_token(next_state, states, trained):
    """The position after the last token is a separate state.

    A response that reaches its limit has no such state and gets the score on its last token.
    """
    place = ScorePosition("next_token", next_state)
    assert place.states(rows()).int().tolist() == states and place.trained(rows()).int().tolist() == trained
    under = place.states(rows())
    assert rounded(paid(place, rows()).masked_fill(~under, 0.0)) == rounded(
        torch.tensor(ON_NEXT).masked_fill(~under, 0.0)
    )


@pytest.mark.parametrize("place", ["last_token", "next_token"])
def test_scores_of_tokens_are_added_on_the_tokens(place):
    plain, more = (
        paid(ScorePosition(place, "trained"), rows()),
        paid(ScorePosition(place, "trained"), rows(), token_score=0.25),
    )
    assert rounded(more - plain) == [[0.25 * x for x in row] for row in ACTIONS]


# -- with a critic -------------------------------------------------------------------------------------------


def values(rollout):
    """V of state t of row i is (i + 1) * (t + 1) / 10; states after the last one hold arbitrary values."""
    states = torch.arange(rollout.response_width + 1) <= rollout.response_lengths[:, None]
    made = (torch.arange(len(rollout))[:, None] + 1) * (torch.arange(rollout.response_width + 1) + 1) / 10
    return made.masked_fill(~states, 1e6)


def gae_by_loop(rewards, v, after, gamma, lam):
    """Computes GAE of one row by its definition (Schulman et al. 2016): the sum of (gamma lam)^k delta."""
    following = [*v, after][1:]
    deltas = [r + gamma * n - x for r, x, n in zip(rewards, v, following, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(v))]


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("where", ["last_token", "next_token"])
@pytest.mark.parametrize("lam_critic", [None, 1.0])
def test_gae_over_tokens(where, bootstrap, lam_critic):
    """With ``bootstrap_truncated``, a truncated response bootstraps from V of its last state; others do not.

    The lambda of the returns is independent of the lambda of the advantages.
    """
    rollout, place = rows(), ScorePosition(where, "trained")
    rewards, v = paid(place, rollout), values(rollout)
    made = gae(gamma=0.9, lam=0.8, lam_critic=lam_critic, bootstrap_truncated=bootstrap, place=place)(
        rewards, v, None, rollout
    )
    for i, states in enumerate(ONE_MORE if where == "next_token" else ACTIONS):
        n, length = sum(states), rollout.response_lengths[i]
        after = float(v[i, length]) if bootstrap and not rollout.finished[i] else 0.0
        inputs = rewards[i, :n].tolist(), v[i, :n].tolist(), after, 0.9
        advantages, for_returns = (
            gae_by_loop(*inputs, 0.8),
            gae_by_loop(*inputs, 0.8 if lam_critic is None else lam_critic),
        )
        assert made.advantages[i].tolist() == pytest.approx(
            advantages[:length] + [0.0] * (3 - length), abs=1e-6
        )
        assert made.returns[i].tolist() == pytest.approx(
            [a + x for a, x in zip(for_returns, inputs[1], strict=True)] + [0.0] * (4 - n), abs=1e-6
        )
        assert made.value_mask[i].int().tolist() == states


@pytest.mark.parametrize(
    ("position", "columns", "baselines"),
    [
        ("prompt_last", [0, 0, 0, 0, None], [0.1, 0.2, 0.3, 0.4]),
        # the last response fills the width, so its last token is in the last column
        ("response_last", [2, 1, 2, 3, None], [0.3, 0.4, 0.9, 1.6]),
    ],
)
@pytest.mark.parametrize("where", ["last_token", "next_token"])
def test_the_whole_answer_as_one_action(position, columns, baselines, where):
    """A response has one reward, its score minus 0.1 per token, and one value.

    A response without an action has no reward and no value.
    """
    rollout, place = rows(), ScorePosition(where, "trained")
    made = gae(level="sequence", position=position, gamma=0.3, bootstrap_truncated=True, place=place)(
        paid(place, rollout), values(rollout), None, rollout
    )
    totals = [1 - 0.2, 2 - 0.1, 3 - 0.2, 4 - 0.3]
    for i, (column, length) in enumerate(zip(columns, [2, 1, 2, 3, 0], strict=True)):
        advantage = totals[i] - baselines[i] if i < 4 else 0.0
        assert made.advantages[i].tolist() == pytest.approx(
            [advantage] * length + [0.0] * (3 - length), abs=1e-6
        )
        assert made.value_mask[i].tolist() == [t == column for t in range(4)]
        assert made.returns[i].tolist() == pytest.approx(
            [totals[i] if t == column else 0.0 for t in range(4)], abs=1e-6
        )


# -- without a critic ----------------------------------------------------------------------------------------


def grouped():
    """Makes two prompts with two responses each: of 2 and 1 tokens, and of 3 and 3."""
    return answers([2, 1, 3, 3], [1.0, 4.0, 2.0, 2.0], limits=[3] * 4)


@pytest.mark.parametrize("where", ["last_token", "next_token"])
def test_rewards_to_go(where):
    """Gamma is 0.5 and each token costs 0.1.

    A score on the next token is discounted once more.
    """
    rollout, place = grouped(), ScorePosition(where, "trained")
    estimate = critic_free("reinforce", 0.5, 2, place)
    made = estimate(paid(place, rollout), None, rollout.scores, rollout).advantages
    late = {
        "last_token": [[-0.1 + 0.5 * 0.9, 0.9, 0], [3.9, 0, 0]],
        "next_token": [[-0.1 + 0.5 * 0.4, -0.1 + 0.5, 0], [-0.1 + 2, 0, 0]],
    }
    # the response reaches its limit, so ``where`` does not matter
    full = [-0.1 + 0.5 * (-0.1 + 0.5 * 1.9), -0.1 + 0.5 * 1.9, 1.9]
    assert rounded(made) == rounded(torch.tensor([*late[where], full, full]))


def test_a_response_without_an_action_counts_in_the_group_baseline():
    """The scores are 1, 5, 1, 1; leaving out one of the 1s, the mean of the others is 7 / 3.

    The response with score 5 is a single end token, which is not an action.
    """
    rollout = answers([1, 1, 1, 1], [1.0, 5.0, 1.0, 1.0])
    rollout = replace(rollout, response_mask=torch.tensor([[True], [False], [True], [True]]))
    place = ScorePosition("last_token", "trained")
    estimate = critic_free("rloo", 1.0, 4, place)
    made = estimate(paid(place, rollout, kl=0.0), None, rollout.scores, rollout).advantages
    torch.testing.assert_close(made[:, 0], torch.tensor([1 - 7 / 3, 0.0, 1 - 7 / 3, 1 - 7 / 3]))
