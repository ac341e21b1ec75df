"""From the loss of a token to the policy loss of a micro-batch.

Gradients flow into the policy's log-probs only. The metrics, each (sum, count) over tokens unless noted:

    policy/loss          as aggregated by ``agg``
    policy/clipfrac      tokens where the clip applies: it sets their gradient to zero, but in cispo it limits
                         their weight; in gmpo it applies to the ratio of each token
    policy/clipfrac_low  tokens whose gradient the dual clip sets to zero
    policy/approx_kl     k3 of KL(old || new), with the clamped log-ratio
    policy/kl_k1         log-prob old - new, per token and unclamped
    policy/ratio_mean
    policy/ratio_max     0-dim
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
    """Holds what an objective is computed from. All are [B,T], and 0 outside the mask.

    ``ratio`` is that of the token or of its response, from a clamped log-ratio. ``differences`` is log pi -
    log pi_old of the token, without a clamp. Gradients flow through ``ratio``, ``differences`` and
    ``logprobs``.
    """

    ratio: Tensor
    differences: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    selected: Tensor | None = None  # the tokens that the loss's own selection has chosen


class TokenLoss(NamedTuple):
    """Holds a policy loss per token, and masks of the tokens where a clip applies. All are [B,T]."""

    loss: Tensor
    clipped: Tensor
    clipped_low: Tensor  # clipped by the dual clip


# computes the loss of each token; the second argument is the section algo.policy
PolicyLoss = Callable[[PolicyTerms, Any], TokenLoss]


def unclipped(loss: Tensor) -> TokenLoss:
    """Returns a loss per token without a clip."""
    none = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss, none, none)


def ratio_bounds(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """Returns the bounds 1 - clip_low and 1 + clip_high of the ratio.

    ``clip_low`` None is no lower bound, as is 1, since a ratio is positive; ``clip_high`` None uses clip_low.
    """
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
    """Computes the policy loss of a micro-batch from the loss of each token, and its metrics.

    The log-ratio is masked, then clamped, then exponentiated. Without the clamp float32 gives 0 * inf = NaN
    gradients although the loss is finite.

    Args:
        logprobs, old_logprobs, mask: [B,T].
        advantages: [B,T] or [B].
        objective: One of the functions of this folder.
        policy: The section of the config with the keys of ``objective``.
        ratio: One ratio per token, or one for all tokens of a response: exp of the sum ("sequence") or of the
            mean ("sequence_mean") of the log-ratios.
        log_ratio_clamp: Limits the log-ratio to +-log_ratio_clamp; the gradient is 0 beyond it.
        is_weights: Weights of the token losses [B,T], see rollout_is_weights.
        selected: Mask [B,T] of the tokens that a loss with a selection treats differently.
        agg, totals: See aggregate.

    Returns:
        The loss, 0-dim, and its metrics.
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
    """Computes the clamped log-ratio of each token from masked log pi - log pi_old, [B,T] -> [B,T]."""
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
