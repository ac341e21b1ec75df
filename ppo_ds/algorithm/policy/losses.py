"""The policy losses: the loss of each token, from PolicyTerms (surrogate.py) and the section algo.policy.

Clip-Cov and KL-Cov (Cui et al. 2025) treat the tokens with a high covariance of log-prob and advantage
differently, since these tokens lower the entropy most. selection.py selects them before an optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, ratio_bounds, unclipped
from ppo_ds.ops.masked import masked_mean

_LEAST_PROBABILITY = 1e-8  # lower limit of 1 - p in the logarithm of binary_kl


def ppo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017).

    ``dual_clip``, a constant c > 1, limits the loss to at most -A c where A < 0 (Ye et al. 2020). GSPO (Zheng
    et al. 2025) uses this function too, with r = geometric mean of a response's ratios.
    """
    return clipped(terms, ratio_bounds(policy.clip_low, policy.clip_high), policy.dual_clip)


def clipped(terms: PolicyTerms, bounds: tuple[float, float], dual_clip: float | None) -> TokenLoss:
    """Computes PPO's clipped loss; ``bounds`` are the lower and the upper bound of the ratio."""
    r, advantages = terms.ratio, terms.advantages
    plain, bounded = -advantages * r, -advantages * r.clamp(*bounds)
    loss = torch.maximum(plain, bounded)
    clipped_low = torch.zeros_like(r, dtype=torch.bool)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        clipped_low = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_low, ceiling, loss)
    return TokenLoss(loss, bounded > plain, clipped_low)


def cispo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A clip(r) log pi: the clipped ratio is a weight of the log-prob and has no gradient."""
    r = terms.ratio
    truncated = r.detach().clamp(*ratio_bounds(policy.clip_low, policy.clip_high))
    loss = -terms.advantages * truncated * terms.logprobs
    return TokenLoss(loss, truncated != r, torch.zeros_like(r, dtype=torch.bool))


def reinforce(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A log pi, without a ratio."""
    return unclipped(-terms.advantages * terms.logprobs)


def sapo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A f(r) with the gate f(r) = 4 / tau * sigmoid(tau (r - 1)). No token is clipped.

    The slope of the gate is 1 at r = 1 and falls to 0 on both sides, faster for a larger tau. tau is
    ``tau_pos`` where A > 0, else ``tau_neg``.
    """
    tau = torch.full_like(terms.ratio, policy.tau_neg).masked_fill(terms.advantages > 0, policy.tau_pos)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * (4 / tau)
    return unclipped(-terms.advantages * gate)


def dppo_tv(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes DPPO's loss with the distance |pi - pi_old| (total variation); ``delta`` None means 0.15."""
    distance = (terms.logprobs.detach().exp() - terms.old_logprobs.exp()).abs()
    return masked_beyond(distance, 0.15 if policy.delta is None else policy.delta, terms)


def dppo_kl(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes DPPO's loss with the distance KL(old || new), see binary_kl; ``delta`` None means 0.05."""
    distance = binary_kl(terms.old_logprobs, terms.logprobs.detach())
    return masked_beyond(distance, 0.05 if policy.delta is None else policy.delta, terms)


def masked_beyond(distance: Tensor, delta: float, terms: PolicyTerms) -> TokenLoss:
    """Computes -A r, or 0 if ``distance`` > delta and the log-prob rose with A > 0 or fell with A < 0."""
    logprobs, old = terms.logprobs.detach(), terms.old_logprobs
    away = torch.where(terms.advantages > 0, logprobs > old, (terms.advantages < 0) & (logprobs < old))
    masked = away & (distance > delta)
    loss = torch.where(masked, 0.0, -terms.advantages * terms.ratio)
    return TokenLoss(loss, masked, torch.zeros_like(masked))


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Computes KL(p || q) over two outcomes, the sampled token and all others, from the token's log-probs."""
    rest, other_rest = -torch.expm1(logprobs), -torch.expm1(other_logprobs)
    rest_ratio = rest.clamp(min=_LEAST_PROBABILITY) / other_rest.clamp(min=_LEAST_PROBABILITY)
    return logprobs.exp() * (logprobs - other_logprobs) + rest * rest_ratio.log()


def gmpo(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A r, where r is the geometric mean of the clipped ratios of all tokens of a response.

    Each ratio is clipped on one side, to at most exp(clip_high) where A > 0 and to at least exp(-clip_low)
    elsewhere; a clipped ratio has no gradient. As in the authors' code and in verl, the other side has no
    clip, but the mean log-ratio is limited to [-20, 20].
    """
    log_ratio, advantages = terms.differences, terms.advantages
    high = policy.clip_low if policy.clip_high is None else policy.clip_high
    limited = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-policy.clip_low))
    ratio = masked_mean(limited, terms.mask, dim=1)[:, None].clamp(-20.0, 20.0).exp()
    clipped = limited != log_ratio
    return TokenLoss(-advantages * ratio, clipped, torch.zeros_like(clipped))


def clip_cov(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes PPO's loss, with 0 for the selected tokens, which still count in the divisor of the mean."""
    assert terms.selected is not None
    loss, beyond, clipped_low = clipped(terms, ratio_bounds(policy.clip_low, policy.clip_high), None)
    return TokenLoss(torch.where(terms.selected, 0.0, loss), beyond | terms.selected, clipped_low)


def kl_cov(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A r, plus kl_cov_coef * |log pi - log pi_old| (unclamped, as in verl) for selected tokens."""
    assert terms.selected is not None
    loss = -terms.advantages * terms.ratio
    penalized = loss + policy.kl_cov_coef * terms.differences.abs()
    return unclipped(torch.where(terms.selected, penalized, loss))
