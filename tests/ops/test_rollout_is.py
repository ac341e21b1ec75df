"""Tests the importance weights at each level against values of peers and an implementation in NumPy."""

import math

import numpy as np
import pytest
import torch

from tests.ops.by_name import bounded_is_ratio, rollout_is_weights

LEVELS = ("token", "sequence", "sequence_mean")
NAN = float("nan")


def by_definition(old, rollout, lengths, kind, level, low, high):
    """Computes the weights of each response by itself, in float64, from the definitions."""
    weights = np.zeros(old.shape)
    for i, n in enumerate(lengths):
        token = np.exp(old[i, :n].astype(float) - rollout[i, :n].astype(float))
        ratio = {
            "token": token,
            "sequence": np.full(n, np.prod(token)),
            "sequence_mean": np.full(n, np.prod(token) ** (1 / max(n, 1))),
        }[level]
        if kind == "truncate":
            weights[i, :n] = np.minimum(np.maximum(ratio, low), high)
        else:
            weights[i, :n] = [w if low <= w <= high else 0.0 for w in ratio]
    return weights


@pytest.mark.parametrize("bounds", [(0.8, 1.25), (0.0, 1.1), (0.9, 9.0)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_weights_follow_their_definitions(kind, level, bounds):
    """Rows have 0 to 7 tokens; the columns hold NaN after them."""
    draw = np.random.default_rng(3)
    lengths = [7, 1, 4, 0, 6, 2, 5, 3]
    old = (-1 - draw.random((8, 7))).astype(np.float32)
    rollout = (old + 0.4 * draw.standard_normal((8, 7))).astype(np.float32)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    columns = (torch.tensor(column).masked_fill(~mask, NAN) for column in (old, rollout))
    found = rollout_is_weights(*columns, mask, kind, *bounds, level)
    expected = by_definition(old, rollout, lengths, kind, level, *bounds)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6, atol=0)
    unbounded = by_definition(old, rollout, lengths, "truncate", level, 0.0, math.inf)
    assert (expected != unbounded).any() and (expected == unbounded).any()  # some are bounded, others not


def logs(rows):
    return torch.tensor(rows).log()


def weights(ratios, kind, level, low=0.5, high=2.0):
    """Returns the weights of responses whose tokens have these ratios; the training log-probs are -1."""
    old = torch.full_like(logs(ratios), -1.0)
    return rollout_is_weights(old, old - logs(ratios), torch.ones_like(old), kind, low, high, level)


E = math.e


def test_long_responses_have_finite_products():
    """The sum of the log-ratios, 4000, is limited to 20."""
    ratios = torch.full((1, 4000), E).tolist()
    assert weights(ratios, "truncate", "sequence", 0.0, 1e30)[0, 0] == pytest.approx(math.exp(20), rel=1e-6)
    assert not weights(ratios, "mask", "sequence").any()


@pytest.mark.parametrize(
    ("kind", "level", "outside"),
    [
        ("tis", "token", [[True, False, True], [False, False, True]]),
        ("truncate", "sequence", [[False] * 3, [True] * 3]),  # products 0.75 and 9
        ("mask", "sequence_mean", [[False] * 3, [True] * 3]),  # 0.91 and 2.08
        ("seq_mask_tis", "token", [[False] * 3, [True] * 3]),
    ],
)
def test_the_bounded_ratio_is_the_one_that_the_kind_compares(kind, level, outside):
    old = torch.full((2, 3), -1.0)
    rollout = old - logs([[0.25, 1.0, 3.0], [1.5, 1.5, 4.0]])
    ratio = bounded_is_ratio(old, rollout, torch.ones(2, 3), kind, level)
    assert ((ratio < 0.5) | (ratio > 2.0)).tolist() == outside
