"""Selects tokens of an optimizer step for a policy loss, by rank or quantile over all rows of all ranks.

Every rank holds all rows of the step, so each rank computes the same selection, whatever the number of
ranks and micro-batches. Ties are broken by position. All arguments are [B,T], and so is the result, a bool
mask that is False outside ``mask``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_ds.ops.masked import keep, masked_mean


def off_policy_tokens(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, mask: Tensor, limit: float
) -> Tensor:
    """Selects the tokens with a negative advantage of responses that the policy has moved away from.

    This is the mask of off-policy sequences of DeepSeek-V3.2 (2025): the mean of log pi_sampling - log pi
    over the tokens of the response exceeds ``limit``.
    """
    drift = masked_mean(sampling_logprobs - logprobs.detach(), mask, dim=1)[:, None]
    return (keep(advantages, mask) < 0) & (drift > limit)


def top_entropy_tokens(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Selects the ``fraction`` of all tokens with the highest entropy (Wang et al. 2025).

    These are the tokens at or above the quantile 1 - fraction, but of several tokens with the entropy of the
    quantile itself only as many as are needed.
    """
    rank = fraction * (int(mask.sum()) - 1)  # of the quantile, from the top
    return _scatter(_largest(entropy[mask], math.floor(rank + 1e-9) + 1), mask)


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Computes the centred product of log-prob and advantage of each token under the mask, [N] float64.

    Its mean is the covariance, which determines the change of entropy in a policy gradient step (Cui et al.
    2025).
    """
    logprobs, advantages = logprobs[mask].double(), advantages[mask].double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    *,
    cov_frac: float | None = None,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Selects a random ``cov_frac`` of all tokens among those whose covariance is in (cov_low, cov_high).

    At least one token is selected if there is one in this range.

    Args:
        generator: Must have the same state on every rank.
        cov_frac: None: 0.0002, as in the paper.
    """
    covariance = covariances(logprobs, advantages, mask)
    candidates = ((covariance > cov_low) & (covariance < cov_high)).nonzero()[:, 0]
    count = _count(len(covariance), 0.0002 if cov_frac is None else cov_frac)
    order = torch.randperm(len(candidates), generator=generator)
    return _scatter(candidates[order[:count]], mask)


def kl_cov_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    *,
    cov_frac: float | None = None,
) -> Tensor:
    """Selects the ``cov_frac`` of all tokens, at least one, with the largest covariance.

    Args:
        generator: Ignored.
        cov_frac: None: 0.002, as in the paper.
    """
    covariance = covariances(logprobs, advantages, mask)
    count = _count(len(covariance), 0.002 if cov_frac is None else cov_frac)
    return _scatter(_largest(covariance, count), mask)


def _count(tokens: int, fraction: float) -> int:
    return max(int(fraction * tokens), 1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Returns the positions of the ``count`` largest values of [N]."""
    return values.argsort(descending=True, stable=True)[:count]


def _scatter(chosen: Tensor, mask: Tensor) -> Tensor:
    """Turns positions among the tokens under the mask into a mask of all tokens."""
    selected = torch.zeros(int(mask.sum()), dtype=torch.bool)
    selected[chosen] = True
    return torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask, selected)
