"""CISPO (MiniMax 2025)."""

from __future__ import annotations

from typing import Any

import torch

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, ratio_bounds


def cispo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A clip(r) log pi: the clipped ratio is a weight of the log-prob and has no gradient."""
    r = terms.ratio
    truncated = r.detach().clamp(*ratio_bounds(policy.clip_low, policy.clip_high))
    loss = -terms.advantages * truncated * terms.logprobs
    return TokenLoss(loss, truncated != r, torch.zeros_like(r, dtype=torch.bool))
