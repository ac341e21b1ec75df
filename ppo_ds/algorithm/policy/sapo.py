"""SAPO, soft adaptive policy optimization (Gao et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, unclipped


def sapo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A f(r) with the gate f(r) = 4 / tau * sigmoid(tau (r - 1)). No token is clipped.

    The slope of the gate is 1 at r = 1 and falls to 0 on both sides, the faster the larger tau is. tau is
    ``tau_pos`` where A > 0, else ``tau_neg``.
    """
    tau = torch.full_like(terms.ratio, policy.tau_neg).masked_fill(terms.advantages > 0, policy.tau_pos)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * (4 / tau)
    return unclipped(-terms.advantages * gate)
