"""DPPO, divergence proximal policy optimization (Qi et al. 2026)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss

_LEAST_PROBABILITY = 1e-8  # of all other tokens together, in the logarithm of binary_kl


def dppo_tv(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes DPPO's loss with the total variation |pi - pi_old| of a token, by default up to 0.15."""
    distance = (terms.logprobs.detach().exp() - terms.old_logprobs.exp()).abs()
    return masked_beyond(distance, 0.15 if policy.delta is None else policy.delta, terms)


def dppo_kl(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes DPPO's loss with KL(old || new) of this token or any other one, by default up to 0.05."""
    distance = binary_kl(terms.old_logprobs, terms.logprobs.detach())
    return masked_beyond(distance, 0.05 if policy.delta is None else policy.delta, terms)


def masked_beyond(distance: Tensor, delta: float, terms: PolicyTerms) -> TokenLoss:
    """Computes -A r, and 0 for tokens that moved too far in the direction of their advantage.

    These have A > 0 and r > 1, or A < 0 and r < 1, and a distance from the old policy above ``delta``.
    """
    logprobs, old = terms.logprobs.detach(), terms.old_logprobs
    away = torch.where(terms.advantages > 0, logprobs > old, (terms.advantages < 0) & (logprobs < old))
    masked = away & (distance > delta)
    loss = torch.where(masked, 0.0, -terms.advantages * terms.ratio)
    return TokenLoss(loss, masked, torch.zeros_like(masked))


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Computes KL(p || q) of two outcomes, the first of which has the log-probs given."""
    rest, other_rest = -torch.expm1(logprobs), -torch.expm1(other_logprobs)
    rest_ratio = rest.clamp(min=_LEAST_PROBABILITY) / other_rest.clamp(min=_LEAST_PROBABILITY)
    return logprobs.exp() * (logprobs - other_logprobs) + rest * rest_ratio.log()
