"""Policy losses that limit an update by other means than PPO's clip of the ratio.

Each takes the arguments of ``surrogate_loss`` in ppo_ds.ops.losses except its objective, and has its metrics.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_ds.ops.losses import PolicyTerms, TokenLoss, surrogate_loss


def sapo_loss(*args: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05, **options: Any) -> Any:
    """Computes the loss of SAPO, soft adaptive policy optimization (Gao et al. 2025), and its metrics.

    The loss is -A f(r) with the gate f(r) = 4 / tau * sigmoid(tau (r - 1)). Its slope is 1 at r = 1 and falls
    to 0 on both sides, the faster the larger tau is. tau is ``tau_pos`` where A > 0, else ``tau_neg``.
    """
    return surrogate_loss(partial(soft_objective, tau_pos=tau_pos, tau_neg=tau_neg), *args, **options)


def soft_objective(terms: PolicyTerms, tau_pos: float, tau_neg: float) -> TokenLoss:
    """Computes SAPO's objective. No token is clipped."""
    tau = torch.full_like(terms.ratio, tau_neg).masked_fill(terms.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * (4 / tau)
    unclipped = torch.zeros_like(terms.ratio, dtype=torch.bool)
    return TokenLoss(-terms.advantages * gate, unclipped, unclipped)
