"""REINFORCE."""

from __future__ import annotations

from typing import Any

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, unclipped


def reinforce(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A log pi, without a ratio."""
    return unclipped(-terms.advantages * terms.logprobs)
