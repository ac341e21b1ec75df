"""Generalised advantage estimation with a critic (Schulman et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.responses import CreditOptions, Estimate, Responses
from ppo_ds.algorithm.credit.returns import discounted_sum
from ppo_ds.ops.masked import keep, masked_sum, widen
from ppo_ds.ops.sequences import broadcast_sequence


def gae(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates an advantage per token and a return per state; at action_level "sequence", see one_step."""
    if options.action_level == "sequence":
        return one_step(responses, options)
    assert responses.values is not None
    keys, lam = options.gae, options.gae.lam
    last_values = responses.values.gather(1, responses.lengths[:, None])[:, 0]  # V after the last token
    bootstrap = last_values.masked_fill(responses.finished, 0.0) if keys.bootstrap_truncated else None
    if keys.length_alpha is not None:
        lam = length_adaptive_lambda(responses.mask.sum(1), keys.length_alpha)
    advantages, returns = compute_gae(
        responses.rewards, responses.values, responses.states, keys.gamma, lam, bootstrap, keys.lam_critic
    )
    return responses.of_tokens(advantages, returns, responses.trained)


def one_step(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates one advantage per response, treated as a single action: sum of rewards - V.

    With ``value_position`` "prompt_last", V is V(prompt). With "response_last", V is V(prompt, response),
    which is no valid baseline, because a perfect critic would make all advantages zero.
    """
    assert responses.values is not None
    mask, values, column = responses.mask, responses.values, responses.lengths
    if options.value_position == "prompt_last":
        column = torch.zeros_like(column)
    chosen = (torch.arange(values.shape[1]) == column[:, None]) & mask.any(dim=1, keepdim=True)
    totals = masked_sum(responses.rewards, responses.states, dim=1)
    advantages = totals - masked_sum(values, chosen, dim=1)
    return Estimate(broadcast_sequence(advantages, mask), broadcast_sequence(totals, chosen), chosen)


@torch.no_grad()
def compute_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap_value: Tensor | None = None,
    lam_critic: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimates (Schulman et al. 2016) and returns, [B,T] each.

        delta_t = r_t + gamma * V_{t+1} - V_t      A_t = delta_t + gamma * lam * A_{t+1}      returns = A + V

    Position t + 1 is the next position with mask = 1: masked positions are skipped without decay. V after the
    last position is ``bootstrap_value`` [B], or 0. ``lam`` is a scalar or has one value per response [B].
    ``lam_critic``, if given, replaces ``lam`` in the returns (VC-PPO).
    """
    rewards, values = keep(rewards, mask), keep(values, mask)
    deltas = rewards + gamma * next_values(values, mask, bootstrap_value) - values
    advantages = discounted_sum(deltas, mask, gamma * lam)
    lambda_returns = advantages if lam_critic is None else discounted_sum(deltas, mask, gamma * lam_critic)
    return advantages, lambda_returns + values


@torch.no_grad()
def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Computes VAPO's lambda of each response, 1 - 1 / (alpha * length), at least 0 (Yue et al. 2025)."""
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0.0)


def next_values(values: Tensor, mask: Tensor, bootstrap_value: Tensor | None) -> Tensor:
    """Returns V at the next position with mask = 1, [B,T]; if there is none, ``bootstrap_value`` [B] or 0."""
    width = values.shape[1]
    final = (
        torch.zeros_like(values[:, 0]) if bootstrap_value is None else widen(bootstrap_value).to(values.dtype)
    )
    positions = torch.where(mask.bool(), torch.arange(width, device=values.device), width)
    following = torch.nn.functional.pad(positions[:, 1:], (0, 1), value=width)
    # the smallest position > t with mask = 1; ``width`` if there is none, which selects ``final``
    following = following.flip(1).cummin(dim=1).values.flip(1)
    return torch.cat([values, final[:, None]], dim=1).gather(1, following)
