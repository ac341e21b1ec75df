"""Computes the policy loss of a micro-batch from the losses of its tokens.

Only the policy's log-probs get gradients. Metrics are (sum, count) over tokens; policy/ratio_max is 0-dim.
policy/clipfrac counts the tokens where the clip applies, policy/clipfrac_low those where the dual clip
applies. policy/approx_kl is k3 of KL(old || new) with the clamped log-ratio; policy/kl_k1 is not clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_ds.algorithm.kl.estimators import k3
from ppo_ds.algorithm.loss.aggregation import Aggregation, BatchTotals, aggregate, loss_parts, mean_parts
from ppo_ds.ops.logprobs import sequence_logprobs
from ppo_ds.ops.masked import keep, masked_mean


class PolicyTerms(NamedTuple):
    """Holds the inputs of a policy loss, [B,T] each, and 0 outside the mask."""

    ratio: Tensor  # of the token or of its response, clamped; has a gradient, like the next two
    differences: Tensor  # log pi - log pi_old, unclamped
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    selected: Tensor | None = None  # the mask that PolicyConfig.selection returned


class TokenLoss(NamedTuple):
    """Holds a policy loss per token, and masks of the tokens where a clip applies; [B,T]."""

    loss: Tensor
    clipped: Tensor
    clipped_low: Tensor  # clipped by the dual clip


# computes the loss of each token; the second argument is the section algo.policy
PolicyLoss = Callable[[PolicyTerms, Any], TokenLoss]


def unclipped(loss: Tensor) -> TokenLoss:
    """Returns the TokenLoss of a loss without a clip."""
    none = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss, none, none)


def ratio_bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Returns 1 - clip_low (0 if clip_low is None) and 1 + clip_high (1 + clip_low if clip_high is None)."""
    high = clip_low if clip_high is None else clip_high
    assert high is not None, "clip_high must be set if clip_low is None"
    return 1 - (1.0 if clip_low is None else clip_low), 1 + high


def surrogate_loss(
    objective: PolicyLoss,
    policy: Any,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: str = "token",
    log_ratio_clamp: float = 20.0,
    is_weights: Tensor | None = None,
    selected: Tensor | None = None,
    agg: Aggregation,
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the policy loss of a micro-batch (0-dim) from the loss of each token, and its metrics.

    Log-probs, ``mask`` and ``is_weights`` (weights of the token losses) are [B,T]; ``advantages`` is [B,T] or
    [B]. ``policy`` is the section algo.policy. ``ratio`` "token" means one ratio per token; "sequence" and
    "sequence_mean" mean one per response, exp of the sum or of the mean of its tokens' log-ratios.

    The log-ratio is clamped before exp, because float32 otherwise gives 0 * inf = NaN gradients although the
    loss is finite. ``selected`` [B,T] is the result of PolicyConfig.selection.
    """
    current, old = keep(logprobs, mask), keep(old_logprobs.detach(), mask)
    advantages = keep((advantages if advantages.dim() == 2 else advantages[:, None]).detach(), mask)
    differences = current - old
    log_ratio = clamped_log_ratio(differences, mask, ratio, log_ratio_clamp)
    r = log_ratio.exp()
    loss, clipped, clipped_low = objective(
        PolicyTerms(r, differences, current, old, advantages, mask, selected), policy
    )
    if is_weights is not None:
        loss = loss * keep(is_weights.detach(), mask)
    # samples come from the old policy, so d = log old - log new
    old_to_new = k3(-log_ratio.detach(), torch.zeros_like(log_ratio))
    metrics = {
        "policy/loss": loss_parts(loss, mask, agg, totals),
        "policy/clipfrac": mean_parts(clipped, mask),
        "policy/clipfrac_low": mean_parts(clipped_low, mask),
        "policy/approx_kl": mean_parts(old_to_new, mask),
        "policy/kl_k1": mean_parts(-differences, mask),
        "policy/ratio_mean": mean_parts(r, mask),
        "policy/ratio_max": keep(r.detach(), mask).max().double(),
    }
    return aggregate(loss, mask, agg, totals), metrics


def clamped_log_ratio(differences: Tensor, mask: Tensor, ratio: str, clamp: float) -> Tensor:
    """Computes the clamped log-ratio in the unit ``ratio`` from masked log pi - log pi_old, both [B,T]."""
    match ratio:
        case "token":
            log_ratio = differences
        case "sequence":
            log_ratio = sequence_logprobs(differences, mask)[:, None]
        case "sequence_mean":
            log_ratio = masked_mean(differences, mask, dim=1)[:, None]
        case _:
            raise ValueError(f"unknown ratio {ratio!r}: token, sequence or sequence_mean")
    return log_ratio.clamp(-clamp, clamp).expand_as(differences)
