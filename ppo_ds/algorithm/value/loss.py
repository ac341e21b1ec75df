"""Loss of the values."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.algorithm.loss.aggregation import Aggregation, BatchTotals, aggregate, loss_parts, mean_parts
from ppo_ds.ops.masked import keep
from ppo_ds.ops.moments import explained_variance_moments


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    half: bool = True,
    agg: Aggregation,
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the squared error of the values [B,T], aggregated to a scalar, and its metrics.

    With ``clip``, a token's error is the larger of the errors of V and of V limited to old_values +- clip.
    ``half`` multiplies the loss by 1/2.
    """
    values, old, returns = keep(values, mask), keep(old_values.detach(), mask), keep(returns.detach(), mask)
    loss = (values - returns).square()
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if clip is not None:
        bounded = (torch.clamp(values, old - clip, old + clip) - returns).square()
        clipped = bounded > loss
        loss = torch.maximum(loss, bounded)
    loss = loss / 2 if half else loss
    metrics = {
        "value/loss": loss_parts(loss, mask, agg, totals),
        "value/clipfrac": mean_parts(clipped, mask),
        "value/explained_var": explained_variance_moments(values.detach(), returns, mask),
        "value/mean": mean_parts(values, mask),
    }
    return aggregate(loss, mask, agg, totals), metrics
