"""Where the score is paid, which states there are, and what comes of them; numbers by hand, or by plain loops
over lists.
"""

from dataclasses import replace

import pytest
import torch

from ppo_ds.ppo.advantages import ScorePosition
from tests.ppo.algo_cases import answers, critic_free, gae, rounded

SCORES = [1.0, 2.0, 3.0, 4.0, 5.0]


def rows():
    """Room for more; up to its own limit with an end, and without; up to the limit of all; nothing at all
    (its end is no action).
    """
    return answers([2, 1, 2, 3, 0], SCORES, finished=[True, True, False, False, True], limits=[3, 1, 2, 3, 3])


def paid(place, rollout, kl=0.5, coef=0.2, token_score=0.0):
    """A KL of ``kl`` and a score of ``token_score`` on each token."""
    mask = rollout.response_mask
    kl, tokens = (
        torch.full(mask.shape, kl).masked_fill(~mask, 0.0),
        torch.full(mask.shape, token_score).masked_fill(~mask, 0.0),
    )
    return place.rewards(rollout.scores, coef * kl, replace(rollout, token_scores=tokens))


ON_LAST = [[-0.1, 0.9, 0, 0], [1.9, 0, 0, 0], [-0.1, 2.9, 0, 0], [-0.1, -0.1, 3.9, 0], [0, 0, 0, 0]]
ON_NEXT = [[-0.1, -0.1, 1, 0], [1.9, 0, 0, 0], [-0.1, 2.9, 0, 0], [-0.1, -0.1, 3.9, 0], [5, 0, 0, 0]]
ACTIONS = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
ONE_MORE = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]  # where there is room


@pytest.mark.parametrize("next_state", ["trained", "untrained", "ignored"])
def test_on_the_last_token(next_state):
    """An answer without an action has no place for a score."""
    place = ScorePosition("last_token", next_state)
    assert rounded(paid(place, rows())) == ON_LAST
    assert place.states(rows()).int().tolist() == place.trained(rows()).int().tolist() == ACTIONS


@pytest.mark.parametrize(
    ("next_state", "states", "trained"),
    [("trained", ONE_MORE, ONE_MORE), ("untrained", ONE_MORE, ACTIONS), ("ignored", ACTIONS, ACTIONS)],
)
def test_one_place_after_the_last_token(next_state, states, trained):
    """That place is a state of its own; an answer that fills its limit has none, and is paid on its last
    token.
    """
    place = ScorePosition("next_token", next_state)
    assert place.states(rows()).int().tolist() == states and place.trained(rows()).int().tolist() == trained
    under = place.states(rows())
    assert rounded(paid(place, rows()).masked_fill(~under, 0.0)) == rounded(
        torch.tensor(ON_NEXT).masked_fill(~under, 0.0)
    )


def test_wider_padding_makes_no_room():
    """The limit counts, not the width of the batch."""
    place = ScorePosition("next_token", "trained")
    wide = rows().resized(1, 6)
    assert place.states(wide).int().tolist() == [row + [0] * 3 for row in ONE_MORE]
    assert rounded(paid(place, wide)) == [[*row, 0, 0, 0] for row in ON_NEXT]


@pytest.mark.parametrize("place", ["last_token", "next_token"])
def test_scores_of_tokens_are_added_on_the_tokens(place):
    plain, more = (
        paid(ScorePosition(place, "trained"), rows()),
        paid(ScorePosition(place, "trained"), rows(), token_score=0.25),
    )
    assert rounded(more - plain) == [[0.25 * x for x in row] for row in ACTIONS]


# -- with a critic -------------------------------------------------------------------------------------------


def values(rollout):
    """V of state t of row i: (i + 1) * (t + 1) / 10, rubbish beyond the state after the last token."""
    states = torch.arange(rollout.response_width + 1) <= rollout.response_lengths[:, None]
    made = (torch.arange(len(rollout))[:, None] + 1) * (torch.arange(rollout.response_width + 1) + 1) / 10
    return made.masked_fill(~states, 1e6)


def gae_by_loop(rewards, v, after, gamma, lam):
    """Schulman et al. 2016 over the states of one row: the sum of (gamma lam)^k delta, written out."""
    following = [*v, after][1:]
    deltas = [r + gamma * n - x for r, x, n in zip(rewards, v, following, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(v))]


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("where", ["last_token", "next_token"])
@pytest.mark.parametrize("lam_critic", [None, 1.0])
def test_over_tokens(where, bootstrap, lam_critic):
    """A cut answer goes on from V of its last state where asked to; one that ended is over.

    Returns have a lambda of their own.
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


def test_what_a_cut_answer_goes_on_with():
    """Third and fourth row are cut, at V 0.9 and 1.6; the second ended on its last possible token.

    Gamma 1, lambda 1: on every token the same.
    """
    rollout = rows()
    plain, more = (
        gae(bootstrap_truncated=b)(torch.zeros(5, 4), values(rollout), None, rollout).returns
        for b in (False, True)
    )
    assert rounded(more - plain) == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0.9, 0.9, 0, 0],
        [1.6, 1.6, 1.6, 0],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("position", "columns", "baselines"),
    [
        ("prompt_last", [0, 0, 0, 0, None], [0.1, 0.2, 0.3, 0.4]),
        (
            "response_last",
            [2, 1, 2, 3, None],
            [0.3, 0.4, 0.9, 1.6],
        ),  # the last one in the last column: the answer fills the width
    ],
)
@pytest.mark.parametrize("where", ["last_token", "next_token"])
def test_the_whole_answer_as_one_action(position, columns, baselines, where):
    """One reward, the sum of all (0.1 less for each token); one value.

    An answer without an action has neither.
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


def test_a_lost_score_is_lost_for_whole_answers_too():
    """Only answers that fill their limit keep theirs."""
    rollout, place = rows(), ScorePosition("next_token", "ignored")
    made = gae(level="sequence", position="prompt_last", place=place)(
        paid(place, rollout), values(rollout), None, rollout
    )
    assert rounded(made.returns)[:4] == [[-0.2, 0, 0, 0], [1.9, 0, 0, 0], [2.8, 0, 0, 0], [3.7, 0, 0, 0]]


# -- without -------------------------------------------------------------------------------------------------


def grouped():
    """Two prompts with two answers each: 2 and 1 tokens, 3 and 3."""
    return answers([2, 1, 3, 3], [1.0, 4.0, 2.0, 2.0], limits=[3] * 4)


@pytest.mark.parametrize("where", ["last_token", "next_token"])
def test_rewards_to_come(where):
    """Gamma 0.5, a charge of 0.1 on each token. Paid one place later, the score is discounted once more."""
    rollout, place = grouped(), ScorePosition(where, "trained")
    estimate = critic_free("reinforce", 0.5, 2, place)
    made = estimate(paid(place, rollout), None, rollout.scores, rollout).advantages
    late = {
        "last_token": [[-0.1 + 0.5 * 0.9, 0.9, 0], [3.9, 0, 0]],
        "next_token": [[-0.1 + 0.5 * 0.4, -0.1 + 0.5, 0], [-0.1 + 2, 0, 0]],
    }
    full = [-0.1 + 0.5 * (-0.1 + 0.5 * 1.9), -0.1 + 0.5 * 1.9, 1.9]  # fills its limit either way
    assert rounded(made) == rounded(torch.tensor([*late[where], full, full]))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # totals: scores less 0.1 for each token: 0.8 and 3.9, 1.7 and 1.7
        ("rloo", [-3.1, 3.1, 0, 0]),
        ("dr_grpo", [-1.55, 1.55, 0, 0]),
        ("grpo", [-1.55 / 2.192031, 1.55 / 2.192031, 0, 0]),  # std over n - 1: sqrt(2 * 1.55^2)
        ("opo", [0.8 - 5.5 / 3, 3.9 - 5.5 / 3, 0, 0]),  # the mean by length: (2 * 0.8 + 3.9) / 3
    ],
)
@pytest.mark.parametrize("where", ["last_token", "next_token"])
def test_against_the_other_answers_to_a_prompt(kind, expected, where):
    """The KL in the reward counts; the sum over an answer is the same wherever the score is paid."""
    rollout, place = grouped(), ScorePosition(where, "trained")
    estimate = critic_free(kind, 0.5, 2, place)
    made = estimate(paid(place, rollout), None, rollout.scores, rollout).advantages
    for i, length in enumerate([2, 1, 3, 3]):
        assert made[i].tolist() == pytest.approx([expected[i]] * length + [0.0] * (3 - length), abs=1e-5)


def test_neighbours_are_a_group():
    """The same rows as one group of four: means over 0.8, 3.9, 1.7, 1.7 = 8.1 / 4."""
    rollout, place = grouped(), ScorePosition("last_token", "trained")
    estimate = critic_free("dr_grpo", 1.0, 4, place)
    made = estimate(paid(place, rollout), None, rollout.scores, rollout).advantages
    assert made[:, 0].tolist() == pytest.approx(
        [0.8 - 2.025, 3.9 - 2.025, 1.7 - 2.025, 1.7 - 2.025], abs=1e-6
    )


def test_an_answer_without_an_action_still_counts_for_the_others():
    """Leave-one-out of scores 1, 5, 1, 1, where the 5 ended at once and its end is no action: the others'
    mean is 7 / 3.
    """
    rollout = answers([1, 1, 1, 1], [1.0, 5.0, 1.0, 1.0])
    rollout = replace(rollout, response_mask=torch.tensor([[True], [False], [True], [True]]))
    place = ScorePosition("last_token", "trained")
    estimate = critic_free("rloo", 1.0, 4, place)
    made = estimate(paid(place, rollout, kl=0.0), None, rollout.scores, rollout).advantages
    torch.testing.assert_close(made[:, 0], torch.tensor([1 - 7 / 3, 0.0, 1 - 7 / 3, 1 - 7 / 3]))
