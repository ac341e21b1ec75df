"""Selects tokens for a policy loss, as a bool mask [B,T]. Ties are broken by position.

off_policy_tokens treats each response separately. The other functions must receive all rows of an optimizer
step, of all ranks. Every rank holds these rows, so all ranks compute the same mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ppo_ds.ops.masked import keep, masked_mean


def off_policy_tokens(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, mask: Tensor, limit: float
) -> Tensor:
    """Selects the tokens with a negative advantage in off-policy responses (DeepSeek-V3.2, 2025).

    A response is off-policy if its mean of log pi_sampling - log pi exceeds ``limit``, in nats.
    """
    drift = masked_mean(sampling_logprobs - logprobs.detach(), mask, dim=1)[:, None]
    return (keep(advantages, mask) < 0) & (drift > limit)


def top_entropy_tokens(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Selects the ``fraction`` of all N tokens with the highest entropy (Wang et al. 2025).

    These are floor(fraction * (N - 1)) + 1 tokens: without ties, those at or above the quantile 1 - fraction.
    """
    rank = fraction * (int(mask.sum()) - 1)  # of the quantile, from the top
    return mask_of(largest(entropy[mask], math.floor(rank + 1e-9) + 1), mask)


def count_of(tokens: int, fraction: float) -> int:
    return max(int(fraction * tokens), 1)


def largest(values: Tensor, count: int) -> Tensor:
    """Returns the indices of the ``count`` largest entries of ``values`` [N]."""
    return values.argsort(descending=True, stable=True)[:count]


def mask_of(chosen: Tensor, mask: Tensor) -> Tensor:
    """Converts indices among the tokens with mask = 1 into a mask [B,T]."""
    selected = torch.zeros(int(mask.sum()), dtype=torch.bool)
    selected[chosen] = True
    return torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask, selected)


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Computes (log-prob - mean) * (advantage - mean) of each of the N tokens under the mask, [N] float64."""
    logprobs, advantages = logprobs[mask].double(), advantages[mask].double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov_tokens(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator, policy: Any
) -> Tensor:
    """Selects random tokens among those with a covariance in (cov_low, cov_high).

    Their number is the share ``cov_frac`` (None: 0.0002, as in the paper) of all tokens, at least one. If
    fewer tokens qualify, all of them are selected. ``generator`` must have the same state on every rank.
    """
    covariance = covariances(logprobs, advantages, mask)
    candidates = ((covariance > policy.cov_low) & (covariance < policy.cov_high)).nonzero()[:, 0]
    count = count_of(len(covariance), 0.0002 if policy.cov_frac is None else policy.cov_frac)
    order = torch.randperm(len(candidates), generator=generator)
    return mask_of(candidates[order[:count]], mask)


def kl_cov_tokens(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator, policy: Any
) -> Tensor:
    """Selects the share ``cov_frac`` (None: 0.002, as in the paper) of tokens with the largest covariance."""
    covariance = covariances(logprobs, advantages, mask)
    count = count_of(len(covariance), 0.002 if policy.cov_frac is None else policy.cov_frac)
    return mask_of(largest(covariance, count), mask)
