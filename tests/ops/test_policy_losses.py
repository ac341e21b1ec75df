"""Tests policy losses other than PPO's against numbers worked by hand and an implementation in numpy."""

import math

import pytest
import torch

from ppo_ds.ops.losses import policy_loss
from tests.ops.golden import gradient, leaf


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
