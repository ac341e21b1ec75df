"""Policy losses that limit an update by other means than PPO's clip of the ratio.

Each takes the arguments of ``surrogate_loss`` in ppo_ds.ops.losses except its objective, and has its metrics.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ppo_ds.ops.losses import Bounds, PolicyTerms, TokenLoss, clipped_objective, ratio_bounds, surrogate_loss
from ppo_ds.ops.masked import masked_mean

Divergence = Literal["tv", "kl"]
DIVERGENCE_LIMITS = {"tv": 0.15, "kl": 0.05}  # of Qi et al. 2026, in probability and in nats
_LEAST_PROBABILITY = 1e-8  # of all other tokens together, in the logarithm of binary_kl


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


def dppo_loss(
    *args: Tensor, divergence: Divergence, delta: float | None = None, ratio: str = "token", **options: Any
) -> Any:
    """Computes the loss of DPPO, divergence proximal policy optimization (Qi et al. 2026), and its metrics.

    The loss is -A r, and 0 for tokens that moved too far in the direction of their advantage: A > 0 and
    r > 1, or A < 0 and r < 1, while the divergence from the old policy exceeds ``delta``. The divergence is
    that of two outcomes, this token or any other one.

    Args:
        divergence: "tv": total variation |pi - pi_old|; "kl": KL(old || new).
        delta: None: 0.15 for "tv" and 0.05 for "kl", as in the paper.
        ratio: Ignored, since the divergence is that of a token.
    """
    limit = DIVERGENCE_LIMITS[divergence] if delta is None else delta
    return surrogate_loss(partial(divergence_objective, divergence=divergence, delta=limit), *args, **options)


def divergence_objective(terms: PolicyTerms, divergence: Divergence, delta: float) -> TokenLoss:
    """Computes DPPO's objective: tokens beyond the limit of the divergence have no loss and no gradient."""
    logprobs, old = terms.logprobs.detach(), terms.old_logprobs
    distance = (logprobs.exp() - old.exp()).abs() if divergence == "tv" else binary_kl(old, logprobs)
    away = torch.where(terms.advantages > 0, logprobs > old, (terms.advantages < 0) & (logprobs < old))
    masked = away & (distance > delta)
    loss = torch.where(masked, 0.0, -terms.advantages * terms.ratio)
    return TokenLoss(loss, masked, torch.zeros_like(masked))


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Computes KL(p || q) of two outcomes, the first of which has the log-probs given."""
    rest, other_rest = -torch.expm1(logprobs), -torch.expm1(other_logprobs)
    rest_ratio = rest.clamp(min=_LEAST_PROBABILITY) / other_rest.clamp(min=_LEAST_PROBABILITY)
    return logprobs.exp() * (logprobs - other_logprobs) + rest * rest_ratio.log()


def gmpo_loss(
    *args: Tensor,
    clip_low: float = 0.4,
    clip_high: float | None = None,
    ratio: str = "token",
    **options: Any,
) -> Any:
    """Computes the loss of GMPO, geometric-mean policy optimization (Zhao et al. 2025), and its metrics.

    The loss of each token is -A r, where r is the geometric mean of the clipped ratios of all tokens of its
    response: ratios above exp(clip_high) where A > 0, and below exp(-clip_low) where A < 0, are limited to
    this bound and have no gradient.

    Args:
        clip_low, clip_high: Limits of the log-ratio, not of the ratio. ``clip_high`` None uses clip_low.
        ratio: Ignored, since the loss has a ratio of its own.
    """
    high = clip_low if clip_high is None else clip_high
    return surrogate_loss(partial(geometric_mean_objective, low=clip_low, high=high), *args, **options)


def geometric_mean_objective(terms: PolicyTerms, low: float, high: float) -> TokenLoss:
    """Computes GMPO's objective: one ratio per response, of token ratios that are clipped one by one.

    The side that the clip leaves open has no other limit, as in the authors' code and in verl: a single
    token that moved far keeps its gradient, since the mean of the response stays moderate. Only that mean is
    clamped, so that its exponential is finite.
    """
    log_ratio, advantages = terms.differences, terms.advantages
    limited = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    ratio = masked_mean(limited, terms.mask, dim=1)[:, None].clamp(-20.0, 20.0).exp()
    clipped = limited != log_ratio
    return TokenLoss(-advantages * ratio, clipped, torch.zeros_like(clipped))


def clip_cov_loss(
    *args: Tensor,
    selected: Tensor,
    clip_low: float | None = 0.2,
    clip_high: float | None = None,
    ratio: str = "token",
    **options: Any,
) -> Any:
    """Computes the loss of Clip-Cov (Cui et al. 2025), and its metrics.

    This is PPO's loss without the ``selected`` tokens [B,T], whose high covariance of log-prob and advantage
    would lower the entropy most. They have no loss and no gradient, but count in the divisor of the mean.

    Args:
        clip_low, clip_high: See policy_loss in ppo_ds.ops.losses; 1 and 1 in the authors' runs.
        ratio: Ignored, since the covariance is that of a token.
    """
    bounds = ratio_bounds(clip_low, clip_high)
    return surrogate_loss(partial(detached_objective, bounds=bounds, selected=selected), *args, **options)


def detached_objective(terms: PolicyTerms, bounds: Bounds, selected: Tensor) -> TokenLoss:
    """Computes Clip-Cov's objective: the selected tokens count as clipped."""
    loss, clipped, clipped_low = clipped_objective(terms, bounds, None)
    return TokenLoss(torch.where(selected, 0.0, loss), clipped | selected, clipped_low)


def kl_cov_loss(
    *args: Tensor, selected: Tensor, kl_cov_coef: float = 1.0, ratio: str = "token", **options: Any
) -> Any:
    """Computes the loss of KL-Cov (Cui et al. 2025), and its metrics.

    The loss is -A r, without a clip. The ``selected`` tokens [B,T] have a penalty in addition, kl_cov_coef *
    |log pi - log pi_old|, the estimate of KL(old || new) in the authors' code.
    """
    return surrogate_loss(partial(penalized_objective, coef=kl_cov_coef, selected=selected), *args, **options)


def penalized_objective(terms: PolicyTerms, coef: float, selected: Tensor) -> TokenLoss:
    """Computes KL-Cov's objective. No token is clipped, and the penalty has no limit, as in verl."""
    loss = -terms.advantages * terms.ratio
    unclipped = torch.zeros_like(selected)
    penalized = loss + coef * terms.differences.abs()
    return TokenLoss(torch.where(selected, penalized, loss), unclipped, unclipped)
