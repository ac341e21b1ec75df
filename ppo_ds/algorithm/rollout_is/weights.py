"""Importance weights that correct for the sampling engine's log-probs, w = pi / pi_sampling per token.

W is a token's w at level "token"; otherwise it is the product ("sequence") or the geometric mean
("sequence_mean") of all w of a response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.algorithm.policy.surrogate import clamped_log_ratio
from ppo_ds.algorithm.rollout_is.keys import Bounded
from ppo_ds.config.registry import import_target
from ppo_ds.ops.masked import keep, masked_mean

# (weights, ratio that the bounds limit), [B,T] each; log w is 0 where mask = 0
Weights = tuple[Tensor, Tensor]


def truncate(log_weights: Tensor, mask: Tensor, section: Bounded) -> Weights:
    """Limits W to [low, high]."""
    ratio = clamped_log_ratio(log_weights, mask, section.unit, 20.0).exp()
    return ratio.clamp(section.low, section.high), ratio


def mask_outside(log_weights: Tensor, mask: Tensor, section: Bounded) -> Weights:
    """Keeps W where it is in [low, high], and sets it to 0 elsewhere."""
    ratio = clamped_log_ratio(log_weights, mask, section.unit, 20.0).exp()
    return torch.where(_inside(ratio, section), ratio, 0.0), ratio


def sequence_mask_tis(log_weights: Tensor, mask: Tensor, section: Bounded) -> Weights:
    """Keeps w, but sets it to 0 in responses whose geometric mean of w lies outside [low, high]."""
    mean = masked_mean(log_weights, mask, dim=1).exp()[:, None].expand_as(log_weights)
    return torch.where(_inside(mean, section), log_weights.clamp(-20.0, 20.0).exp(), 0.0), mean


def _inside(ratio: Tensor, section: Bounded) -> Tensor:
    return (ratio >= section.low) & (ratio <= section.high)


@torch.no_grad()
def rollout_is_weights(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, section: Bounded) -> Weights:
    """Computes the weights of `algo.rollout_is` (0 where mask = 0), and the ratio that the bounds limit."""
    log_weights = keep(logprobs, mask) - keep(rollout_logprobs, mask)
    weights, bounded = import_target(section.function)(log_weights, mask, section)
    return keep(weights, mask), bounded
