"""Tests whitening of advantages to mean 0 and variance 1: over which values, and how they are weighted."""

import statistics

import pytest
import torch

from ppo_ds.algorithm.credit.whitening import Whitening

LENGTHS = [2, 1, 3, 1]
RAW = [[1.0, 2.0], [6.0], [-1.0, 0.0, 4.0], [8.0]]
WHOLE = [1.5, 6.0, 1.0, 8.0]  # mean over the tokens of each response


def columns():
    mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
    return torch.tensor([[*row, *[1e6] * (3 - len(row))] for row in RAW]), mask


def flat(x, mask):
    return x[mask].tolist()


def whitened(numbers, unbiased):
    spread = statistics.stdev(numbers) if unbiased else statistics.pstdev(numbers)
    return [(x - statistics.fmean(numbers)) / spread for x in numbers]


TOKENS = [x for row in RAW for x in row]


def per_token(numbers):
    return [x for x, length in zip(numbers, LENGTHS, strict=True) for _ in range(length)]


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(
    ("over", "level", "expected"),
    [
        ("batch", "token", lambda u: whitened(TOKENS, u)),
        ("group", "token", lambda u: whitened(TOKENS[:3], u) + whitened(TOKENS[3:], u)),
        ("batch", "sequence", lambda u: per_token(whitened(WHOLE, u))),
        ("group", "sequence", lambda u: per_token(whitened(WHOLE[:2], u) + whitened(WHOLE[2:], u))),
    ],
)
def test_whitening_of_the_experience(world, over, level, unbiased, expected):
    """Each token counts once, or on level sequence each response, whatever its length."""
    raw, mask = columns()
    whitening = Whitening(over, unbiased, level)
    made = whitening.whiten_rollout(raw, mask, 2, world.sum)
    assert flat(made, mask) == pytest.approx(expected(unbiased), abs=1e-5) and made[~mask].abs().max() == 0


@pytest.mark.parametrize("over", ["batch", "group"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_ranks_equal_one(on_ranks, world, over, level):
    """Each rank has one group, at its own width."""
    raw, mask = columns()
    whitening = Whitening(over, True, level)
    whole = flat(whitening.whiten_rollout(raw, mask, 2, world.sum), mask)
    shares = [(raw[:2, :2], mask[:2, :2]), (raw[2:], mask[2:])]
    made = on_ranks(
        2,
        lambda world: flat(
            whitening.whiten_rollout(*shares[world.rank], 2, world.sum), shares[world.rank][1]
        ),
    )
    assert made[0] + made[1] == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_answers_without_an_action_do_not_count(world, level):
    raw, mask = columns()
    more, empty = (
        torch.cat([raw, torch.full((2, 3), 1e6)]),
        torch.cat([mask, torch.zeros(2, 3, dtype=torch.bool)]),
    )
    whitening = Whitening("batch", False, level)
    assert flat(whitening.whiten_rollout(more, empty, 2, world.sum), empty) == pytest.approx(
        flat(whitening.whiten_rollout(raw, mask, 2, world.sum), mask)
    )
    nothing = Whitening("group", True, level).whiten_rollout(more, empty, 2, world.sum)
    assert torch.isfinite(nothing).all() and nothing[4:].abs().max() == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_advantages_become_zero(world, level):
    """All advantages of a group are equal; a deviation of 0 must not give NaN."""
    made = Whitening("group", True, level).whiten_rollout(
        torch.full((2, 2), 0.3), torch.ones(2, 2, dtype=torch.bool), 2, world.sum
    )
    assert made.abs().max() < 1e-3
