"""PPO's clipped objective."""

from __future__ import annotations

from typing import Any

import torch

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, ratio_bounds


def ppo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017).

    ``dual_clip``, a constant c > 1, bounds the loss by -A c where A < 0 (Ye et al. 2020). The loss of GSPO
    (Zheng et al. 2025) is the same, of the geometric mean of a response's ratios.
    """
    return clipped(terms, ratio_bounds(policy.clip_low, policy.clip_high), policy.dual_clip)


def clipped(terms: PolicyTerms, bounds: tuple[float, float], dual_clip: float | None) -> TokenLoss:
    """Computes the clipped objective from the bounds of the ratio."""
    r, advantages = terms.ratio, terms.advantages
    plain, bounded = -advantages * r, -advantages * r.clamp(*bounds)
    loss = torch.maximum(plain, bounded)
    clipped_low = torch.zeros_like(r, dtype=torch.bool)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        clipped_low = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_low, ceiling, loss)
    return TokenLoss(loss, bounded > plain, clipped_low)
