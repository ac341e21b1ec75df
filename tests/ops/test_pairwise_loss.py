"""Tests the loss of reward models against TRL's formula, written independently, and values by hand."""

import math

import pytest
import torch

from ppo_ds.finetune.pairwise import pair_accuracy, pairwise_loss


def trl(chosen, rejected, margin=None, coef=0.0):
    """The loss of TRL's RewardTrainer (compute_loss), with center_rewards_coefficient ``coef``."""
    rewards = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -torch.nn.functional.logsigmoid(rewards).mean()
    return loss + coef * torch.mean((chosen + rejected) ** 2)


def inputs(n=7):
    torch.manual_seed(0)
    chosen, rejected = (torch.randn(n, requires_grad=True) for _ in range(2))
    return chosen, rejected, torch.rand(n)


@pytest.mark.parametrize("coef", [0.0, 0.01])
@pytest.mark.parametrize("with_margin", [False, True])
def test_loss_and_gradients_are_those_of_trl(coef, with_margin):
    chosen, rejected, margins = inputs()
    margins = margins if with_margin else None
    ours, _ = pairwise_loss(chosen, rejected, margins=margins, centering=coef)
    theirs = trl(chosen, rejected, margins, coef)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    for mine, other in zip(
        torch.autograd.grad(ours, [chosen, rejected]),
        torch.autograd.grad(theirs, [chosen, rejected]),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


def test_parts_of_a_step_add_up_to_its_mean():
    chosen, rejected, margins = inputs()
    whole, metrics = pairwise_loss(chosen, rejected, margins=margins, centering=0.1)
    parts = [
        pairwise_loss(chosen[p], rejected[p], margins=margins[p], centering=0.1, pairs=7, dp_size=2)
        for p in (slice(0, 3), slice(3, 4), slice(4, 7))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts) / 2, whole)
    for name, part in metrics.items():
        torch.testing.assert_close(sum(each[name] for _, each in parts), part)


def test_label_smoothing_by_hand():
    loss, metrics = pairwise_loss(torch.tensor([2.0]), torch.tensor([1.0]), label_smoothing=0.1)
    assert float(loss) == pytest.approx(0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.exp(1)))
    assert metrics["rm/margin_mean"].tolist() == [1.0, 1.0]


def test_a_tie_counts_as_half_a_correct_pair():
    differences = torch.tensor([1e-30, 0.0, -3.0])
    assert pair_accuracy(differences).tolist() == [1.0, 0.5, 0.0]
    _, metrics = pairwise_loss(torch.tensor([1.0, 0.0]), torch.zeros(2))
    assert metrics["rm/accuracy"].tolist() == [1.5, 2.0]


def test_large_differences_stay_finite():
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss, _ = pairwise_loss(chosen, torch.zeros(2))
    loss.backward()
    assert loss.item() == pytest.approx(5e3) and chosen.grad.tolist() == [-0.5, 0.0]
