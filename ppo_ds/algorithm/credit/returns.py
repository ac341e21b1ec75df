"""Estimators without a critic that compute a return for each token: REINFORCE and ReMax."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.positions import token_rewards
from ppo_ds.algorithm.credit.responses import CreditOptions, Estimate, Responses
from ppo_ds.ops.masked import keep


def reinforce(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates the discounted sum of future rewards, without a baseline."""
    return responses.of_tokens(discounted_sum(responses.rewards, responses.states, options.gae.gamma))


def remax(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates the discounted sum of future rewards, minus a baseline (ReMax, Li et al. 2024).

    The baseline, the score of a greedy response to the same prompt, is subtracted at the last position.
    """
    assert responses.baselines is not None
    rewards = responses.rewards - token_rewards(responses.baselines, responses.states)
    return responses.of_tokens(discounted_sum(rewards, responses.states, options.gae.gamma))


@torch.no_grad()
def discounted_sum(x: Tensor, mask: Tensor, decay: float | Tensor) -> Tensor:
    """Computes y_t = x_t + decay * y_{t+1}, [B,T], over the positions with mask = 1; 0 elsewhere.

    Masked positions are skipped without decay. ``decay`` is a scalar or has one value per row [B].
    """
    columns = keep(x, mask).t().contiguous()
    ones = torch.ones_like(columns)
    decays = torch.where(mask.bool().t(), (ones * decay).to(columns.dtype), ones).contiguous()
    y = torch.zeros_like(columns)
    running = torch.zeros_like(columns[0])
    for t in reversed(range(len(columns))):
        running = torch.addcmul(columns[t], decays[t], running, out=y[t])
    return keep(y.t(), mask)
