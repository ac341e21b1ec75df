"""Tests policy losses other than PPO's against numbers worked by hand and an implementation in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from ppo_ds.algorithm.policy.losses import binary_kl
from tests.ops.by_name import clip_cov_loss, dppo_loss, gmpo_loss, kl_cov_loss, policy_loss
from tests.ops.golden import gradient, leaf

# Three responses of 3, 2 and 1 tokens: log pi of the old policy, the log-ratio, and the advantages.
LENGTHS = [3, 2, 1]
OLD = [[-0.1, -1.0, -3.0], [-0.5, -2.0], [-0.02]]
LOG_RATIOS = [[-1.5, 0.3, 1.2], [0.45, -0.9], [-2.5]]
ADVANTAGES = [[1.5, 1.5, 1.5], [-0.7, -0.7], [-2.0]]
MASK = torch.arange(3) < torch.tensor(LENGTHS)[:, None]


def column(rows):
    """Makes a float64 tensor [3,3] of rows; the padding is NaN."""
    return torch.tensor([[*row, *[math.nan] * (3 - len(row))] for row in rows], dtype=torch.float64)


def ours(loss, **options):
    """Returns a loss and its gradient, and its metrics as means."""
    x = leaf(column(OLD) + column(LOG_RATIOS))
    value, metrics = loss(x, column(OLD), column(ADVANTAGES), MASK, **options)
    means = {name: float(m[0] / m[1]) for name, m in metrics.items() if m.dim()}
    return value.item(), gradient(value, x)[MASK].numpy(), means


def numerical(objective):
    """Computes a loss in numpy, the mean over all tokens, and its gradient by central differences.

    ``objective`` takes the log-probs, old log-probs and advantages of one response, and returns the loss of
    each of its tokens.
    """
    old, advantages = ([np.array(row) for row in rows] for rows in (OLD, ADVANTAGES))
    flat = np.concatenate([o + np.array(d) for o, d in zip(old, LOG_RATIOS, strict=True)])

    def value(x):
        rows = np.split(x, np.cumsum(LENGTHS)[:-1])
        return np.concatenate([objective(*row) for row in zip(rows, old, advantages, strict=True)]).mean()

    step = 1e-6
    slopes = [(value(flat + step * e) - value(flat - step * e)) / (2 * step) for e in np.eye(len(flat))]
    return value(flat), np.array(slopes)


def test_cispo_without_a_lower_bound():
    """The weight of log pi is min(ratio, 5), without a gradient: ratios e^-3 and e^1 as they are, e^2 as 5.

    With the lower bound 0.8 the first weight is 0.8.
    """
    ratios, mask = torch.tensor([[-3.0, 1.0, 2.0]]), torch.ones(1, 3)
    old, advantages = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[2.0, -1.0, 1.0]])
    for no_bound in (None, 1.0):
        x = leaf(old + ratios)
        loss, metrics = policy_loss(x, old, advantages, mask, kind="cispo", clip_low=no_bound, clip_high=4.0)
        assert loss.item() == pytest.approx((2 * math.exp(-3) * 4 - math.exp(1) + 5 * 2) / 3)
        expected = [-2 * math.exp(-3) / 3, math.exp(1) / 3, -5 / 3]
        assert gradient(loss, x).tolist() == [pytest.approx(expected)]
        assert metrics["policy/clipfrac"].tolist() == [1.0, 3.0]
    x = leaf(old + ratios)
    loss, metrics = policy_loss(x, old, advantages, mask, kind="cispo", clip_high=4.0)
    assert gradient(loss, x)[0, 0].item() == pytest.approx(-2 * 0.8 / 3)
    assert metrics["policy/clipfrac"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize(("divergence", "delta"), [("tv", None), ("kl", None), ("tv", 0.05), ("kl", 0.2)])
def test_dppo(divergence, delta):
    """The mask is computed from the full two-outcome distributions, token by token.

    The loss is -A r, and 0 where the token moved further than delta in the direction of its advantage.
    """
    limit = delta or {"tv": 0.15, "kl": 0.05}[divergence]

    def objective(logprobs, old, advantages):
        losses = []
        for new, before, advantage in zip(logprobs, old, advantages, strict=True):
            p, q = [math.exp(before), 1 - math.exp(before)], [math.exp(new), 1 - math.exp(new)]
            distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
            if divergence == "kl":
                distance = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            r = math.exp(new - before)
            leaves = (advantage > 0 and r > 1) or (advantage < 0 and r < 1)
            losses.append(0.0 if leaves and distance > limit else -advantage * r)
        return np.array(losses)

    loss, slopes, metrics = ours(dppo_loss, divergence=divergence, delta=delta)
    expected, expected_slopes = numerical(objective)
    assert loss == pytest.approx(expected, abs=1e-12) and slopes == pytest.approx(expected_slopes, abs=1e-8)
    masked = (expected_slopes == 0).mean()
    assert 0 < masked < 1 and metrics["policy/clipfrac"] == pytest.approx(masked)


def test_the_kl_of_two_outcomes_is_finite_at_probability_1():
    certain, other = torch.tensor([0.0, -1e-9, -1e-3, -50.0]), torch.tensor([-1e-3, 0.0, 0.0, -1.0])
    kl = binary_kl(certain, other)
    assert kl.isfinite().all() and kl[0].item() == pytest.approx(1e-3, rel=1e-3)
    assert kl[3].item() == pytest.approx(-math.log(1 - math.exp(-1)), rel=1e-5)


def test_gmpo():
    """The ratio of a response is (product of its token ratios, each clipped)^(1/length)."""

    def objective(logprobs, old, advantages):
        product = 1.0
        for new, before, advantage in zip(logprobs, old, advantages, strict=True):
            r = math.exp(new - before)
            product *= min(r, math.exp(0.4)) if advantage > 0 else max(r, math.exp(-0.3))
        return -advantages * product ** (1 / len(old))

    loss, slopes, metrics = ours(gmpo_loss, clip_low=0.3, clip_high=0.4)
    expected, expected_slopes = numerical(objective)
    assert loss == pytest.approx(expected, abs=1e-12) and slopes == pytest.approx(expected_slopes, abs=1e-8)
    # of the log-ratios, 1.2 is above 0.4 where A > 0; -0.9 and -2.5 are below -0.3 where A < 0
    assert metrics["policy/clipfrac"] == pytest.approx(3 / 6)
    assert (expected_slopes == 0).tolist() == [False, False, True, False, True, True]


def test_gmpo_keeps_the_gradient_of_a_token_that_moved_far():
    """50 tokens, A = 1, one log-ratio of -30: the ratio of the response is exp(-30 / 50)."""
    d = torch.zeros(1, 50)
    d[0, 7] = -30.0
    x = leaf(d - 1)
    loss, _ = gmpo_loss(x, torch.full((1, 50), -1.0), torch.ones(1, 1), torch.ones(1, 50))
    assert gradient(loss, x)[0].tolist() == pytest.approx([-math.exp(-0.6) / 50] * 50)


SELECTED = [[False, True, False], [True, False], [True]]


def selected_numerical(objective):
    """Computes a loss like ``numerical``; ``objective`` also takes the row of SELECTED."""
    rows = itertools.cycle(SELECTED)  # one row after the other, in each evaluation

    def with_row(*columns):
        return np.array([objective(*token) for token in zip(*columns, next(rows), strict=True)])

    return numerical(with_row)


SELECTED_MASK = torch.tensor([[*row, *[False] * (3 - len(row))] for row in SELECTED])


def test_clip_cov():
    """The selected tokens have no loss and no gradient; the others have PPO's, over the same divisor."""

    def objective(new, old, advantage, selected):
        r = math.exp(new - old)
        return 0.0 if selected else max(-advantage * r, -advantage * min(max(r, 0.8), 1.28))

    loss, slopes, metrics = ours(clip_cov_loss, selected=SELECTED_MASK, clip_low=0.2, clip_high=0.28)
    expected, expected_slopes = selected_numerical(objective)
    assert loss == pytest.approx(expected, abs=1e-12) and slopes == pytest.approx(expected_slopes, abs=1e-8)
    # three selected tokens; of the others, PPO clips log-ratio 1.2 (A > 0) and -0.9 (A < 0)
    assert metrics["policy/clipfrac"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_kl_cov(coef):
    """The selected tokens have coef * |log pi - log pi_old| in addition; nothing is clipped."""

    def objective(new, old, advantage, selected):
        return -advantage * math.exp(new - old) + (coef * abs(new - old) if selected else 0.0)

    loss, slopes, metrics = ours(kl_cov_loss, selected=SELECTED_MASK, kl_cov_coef=coef)
    expected, expected_slopes = selected_numerical(objective)
    assert loss == pytest.approx(expected, abs=1e-12) and slopes == pytest.approx(expected_slopes, abs=1e-8)
    assert metrics["policy/clipfrac"] == 0


def test_kl_cov_penalizes_a_token_that_moved_far():
    """The penalty |log pi - log pi_old| has the gradient -1 at a log-ratio of -30, where the ratio is 0."""
    x, old = leaf(torch.tensor([[-31.0, -1.0]])), torch.full((1, 2), -1.0)
    selected = torch.tensor([[True, False]])
    loss, _ = kl_cov_loss(x, old, torch.ones(1, 2), torch.ones(1, 2), selected=selected)
    assert loss.item() == pytest.approx((30 - 1) / 2)
    assert gradient(loss, x).tolist() == [pytest.approx([-0.5, -0.5])]
