"""GMPO, geometric-mean policy optimization (Zhao et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss
from ppo_ds.ops.masked import masked_mean


def gmpo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A r, where r is the geometric mean of the clipped ratios of all tokens of a response.

    Ratios above exp(clip_high) where A > 0, and below exp(-clip_low) where A < 0, are limited to this
    bound and have no gradient. The other side is open, as in the authors' code and in verl; only the mean
    is clamped.
    """
    log_ratio, advantages = terms.differences, terms.advantages
    high = policy.clip_low if policy.clip_high is None else policy.clip_high
    limited = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-policy.clip_low))
    ratio = masked_mean(limited, terms.mask, dim=1)[:, None].clamp(-20.0, 20.0).exp()
    clipped = limited != log_ratio
    return TokenLoss(-advantages * ratio, clipped, torch.zeros_like(clipped))
