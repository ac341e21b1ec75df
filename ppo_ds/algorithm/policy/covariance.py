"""Clip-Cov and KL-Cov (Cui et al. 2025): tokens of high covariance of log-prob and advantage.

These tokens would lower the entropy most. They are selected before an optimizer step, over all rows of all
ranks, see selection.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_ds.algorithm.policy.ppo import clipped
from ppo_ds.algorithm.policy.selection import count_of, largest, mask_of
from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss, ratio_bounds, unclipped


def clip_cov(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes PPO's loss without the selected tokens, which still count in the divisor of the mean."""
    assert terms.selected is not None
    loss, beyond, clipped_low = clipped(terms, ratio_bounds(policy.clip_low, policy.clip_high), None)
    return TokenLoss(torch.where(terms.selected, 0.0, loss), beyond | terms.selected, clipped_low)


def kl_cov(terms: PolicyTerms, policy: Any) -> TokenLoss:
    """Computes -A r, without a clip, and adds a penalty to the selected tokens.

    It is kl_cov_coef * |log pi - log pi_old|, the estimate of KL(old || new) in the authors' code. It has no
    limit, as in verl.
    """
    assert terms.selected is not None
    loss = -terms.advantages * terms.ratio
    penalized = loss + policy.kl_cov_coef * terms.differences.abs()
    return unclipped(torch.where(terms.selected, penalized, loss))


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Computes the centred product of log-prob and advantage of each token under the mask, [N] float64."""
    logprobs, advantages = logprobs[mask].double(), advantages[mask].double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def clip_cov_tokens(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator, policy: Any
) -> Tensor:
    """Selects a random ``cov_frac`` (None: 0.0002, as in the paper) of all tokens, at least one.

    They are among those whose covariance is in (cov_low, cov_high). ``generator`` must have the same state
    on every rank.
    """
    covariance = covariances(logprobs, advantages, mask)
    candidates = ((covariance > policy.cov_low) & (covariance < policy.cov_high)).nonzero()[:, 0]
    count = count_of(len(covariance), 0.0002 if policy.cov_frac is None else policy.cov_frac)
    order = torch.randperm(len(candidates), generator=generator)
    return mask_of(candidates[order[:count]], mask)


def kl_cov_tokens(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, generator: torch.Generator, policy: Any
) -> Tensor:
    """Selects the ``cov_frac`` of all tokens, at least one, with the largest covariance.

    ``cov_frac`` None is 0.002, as in the paper. ``generator`` is not used.
    """
    covariance = covariances(logprobs, advantages, mask)
    count = count_of(len(covariance), 0.002 if policy.cov_frac is None else policy.cov_frac)
    return mask_of(largest(covariance, count), mask)
