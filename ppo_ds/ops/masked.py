"""Masked statistics.

Positions with mask = 0 may contain NaN and infinity. They are replaced *before* any arithmetic, so that they
change neither values nor gradients (0 * inf would be NaN).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over all ranks and returns the sum


def widen(x: Tensor) -> Tensor:
    """Converts ``x`` to float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """Returns ``x`` in float32 or wider, with exact zeros where mask = 0; differentiable."""
    return torch.where(mask.bool(), widen(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sums the positions with mask = 1, over all dimensions or over ``dim``."""
    return keep(x, mask).sum(dim=dim)


def sum_and_count(x: Tensor, mask: Tensor) -> Tensor:
    """Returns (sum, count) of the positions with mask = 1, [2]; these add up over micro-batches and ranks."""
    return torch.stack([masked_sum(x.detach(), mask), mask.sum()])


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None, eps: float = 0.0) -> Tensor:
    """Computes sum / (count + eps) over the positions with mask = 1; 0 if there are none."""
    total = masked_sum(x, mask, dim)
    count = mask.bool().expand_as(x).sum(dim=dim).to(total.dtype)
    return total / torch.where(count > 0, count + eps, 1.0)


@torch.no_grad()
def masked_mean_var(
    x: Tensor, mask: Tensor, unbiased: bool = True, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes mean, variance and count (0-dim) of the positions with mask = 1 over all ranks; detached.

    Uses two passes, since E[x^2] - E[x]^2 loses all precision far from 0. A single position has variance 0.
    """
    total = reduce or (lambda t: t)
    mask = mask.bool().expand_as(x)
    values = keep(x, mask).double()
    value_sum, count = total(torch.stack([values.sum(), mask.sum().double()])).unbind()
    mean = value_sum / count.clamp(min=1)
    squares = total(keep(values - mean, mask).square().sum().reshape(1))[0]
    var = squares / (count - int(unbiased)).clamp(min=1)
    dtype = widen(x).dtype
    return mean.to(dtype), var.to(dtype), count.to(dtype)


@torch.no_grad()
def masked_whiten(
    x: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    reduce: Reduce | None = None,
    min_var: float = 0.0,
) -> Tensor:
    """Computes (x - mean) / sqrt(max(var, min_var) + eps) over all ranks, detached; 0 where mask = 0.

    With fewer than two positions, returns x - mean. ``shift_mean`` False adds the mean back, as in TRL.
    """
    mean, var, count = masked_mean_var(x, mask, unbiased, reduce)
    scale = torch.where(count < 2, 1.0, torch.rsqrt(var.clamp(min=min_var) + eps))
    whitened = (keep(x, mask) - mean) * scale
    return keep(whitened if shift_mean else whitened + mean, mask)
