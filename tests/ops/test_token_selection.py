"""Tests the selection of tokens against numbers worked by hand and plain loops over tokens."""

import math

import pytest
import torch

from ppo_ds.algorithm.policy.keys import ClipCov, KLCov
from ppo_ds.algorithm.policy.selection import (
    clip_cov_tokens,
    kl_cov_tokens,
    off_policy_tokens,
    top_entropy_tokens,
)

NAN = math.nan
MASK = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(rows=20, width=30, seed=0):
    """Draws log-probs and advantages of responses of varied length; the padding is NaN."""
    drawn = torch.randn(2, rows, width, generator=generator(seed), dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator(seed))
    return *(x.masked_fill(~mask, NAN) for x in (3 * drawn[0] - 4, drawn[1])), mask


def covariances_by_hand(logprobs, advantages, mask):
    """Returns (covariance, row, column) of each token."""
    places = mask.nonzero().tolist()
    pairs = [(logprobs[i, t].item(), advantages[i, t].item()) for i, t in places]
    mean_p, mean_a = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return [((p - mean_p) * (a - mean_a), i, t) for (p, a), (i, t) in zip(pairs, places, strict=True)]


def places_of(selected):
    return {tuple(place) for place in selected.nonzero().tolist()}


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.2, {(0, 1), (2, 1)}),  # the first and the second: 0.2 * 5 = 1 step from the top
        (0.5, {(0, 1), (2, 1), (0, 2)}),  # of the two tokens with entropy 1, the first
        (0.9, {(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)}),
        (0.01, {(2, 1)}),
    ],
)
def test_the_tokens_of_the_highest_entropy(fraction, expected):
    entropy = torch.tensor([[0.5, 2.0, 1.0], [0.0, 9.0, NAN], [1.0, 3.0, 9.0]])
    selected = top_entropy_tokens(entropy, MASK, fraction)
    assert selected.dtype == torch.bool and places_of(selected) == expected


def test_off_policy_responses_lose_the_tokens_with_a_negative_advantage():
    """The mean drifts are (0.5 + 0.3 + 0.1) / 3 = 0.3, 0.9 and 0.2 nats."""
    sampling = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, NAN, NAN], [-1.0, -1.0, NAN]])
    now = torch.tensor([[-1.5, -1.3, -1.1], [-1.9, NAN, NAN], [-1.0, -1.4, NAN]], requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0, -0.1], [-2.0, -9.0, NAN], [-1.0, -1.0, -1.0]])
    for limit, expected in ((0.25, {(0, 0), (0, 2), (1, 0)}), (0.5, {(1, 0)}), (1.0, set())):
        assert places_of(off_policy_tokens(now, sampling, advantages, MASK, limit)) == expected
    gained = off_policy_tokens(sampling, now.detach(), advantages, MASK, 0.05)  # the drift has the other sign
    assert places_of(gained) == set()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cov_frac", [0.002, 0.05, 0.3])
def test_kl_cov_selects_the_largest_covariances(seed, cov_frac):
    columns = draw(seed=seed)
    found = covariances_by_hand(*columns)
    count = max(int(cov_frac * len(found)), 1)
    expected = {(i, t) for _, i, t in sorted(found, reverse=True)[:count]}
    assert places_of(kl_cov_tokens(*columns, generator(), KLCov(cov_frac=cov_frac))) == expected


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_selects_random_tokens_within_the_bounds(seed):
    columns = draw(seed=seed)
    found = covariances_by_hand(*columns)
    within = {(i, t) for covariance, i, t in found if 1 < covariance < 5}
    few = int(0.05 * len(found))
    assert few < len(within)
    chosen = [places_of(clip_cov_tokens(*columns, generator(n), ClipCov(cov_frac=0.05))) for n in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2] and all(len(c) == few and c <= within for c in chosen)
    assert places_of(clip_cov_tokens(*columns, generator(), ClipCov(cov_frac=0.9))) == within
    assert len(places_of(clip_cov_tokens(*columns, generator(), ClipCov(cov_frac=1e-6)))) == 1
    none = clip_cov_tokens(*columns, generator(), ClipCov(cov_frac=0.9, cov_low=1e6, cov_high=2e6))
    assert places_of(none) == set()


def test_the_defaults_are_the_papers():
    columns = torch.randn(100, 100, dtype=torch.float64), torch.randn(100, 100), torch.ones(100, 100) > 0
    assert (
        kl_cov_tokens(*columns, generator(), KLCov()).sum() == 20
        and clip_cov_tokens(*columns, generator(), ClipCov()).sum() == 2
    )


def test_nothing_is_selected_where_there_are_no_tokens():
    x, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    for selected in (
        top_entropy_tokens(x, mask, 0.2),
        off_policy_tokens(x, x, x, mask, 0.1),
        clip_cov_tokens(x, x, mask, generator(), ClipCov()),
        kl_cov_tokens(x, x, mask, generator(), KLCov()),
    ):
        assert selected.shape == mask.shape and not selected.any()
