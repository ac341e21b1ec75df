"""Counts of values in bins."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 64
RATIO_EDGES = [i / 40 for i in range(81)]  # 0 to 2 in steps of 0.025


def count_bins(values: Tensor, edges: Tensor, mask: Tensor | None = None) -> Tensor:
    """Counts the ``values`` with mask = 1 in the bins between the sorted ``edges`` [N+1]: [N] long.

    Values below or above all edges count in the first or the last bin. NaN is not counted. The function
    sorts the values, because histc and bincount are not deterministic on a GPU.
    """
    counted = ~values.isnan() if mask is None else mask & ~values.isnan()
    in_order = values.masked_fill(~counted, torch.inf).flatten().sort().values
    # the insertion index of an inner edge in the sorted values is the number of values below the edge
    below = torch.searchsorted(in_order, edges[1:-1].to(in_order.dtype))
    return torch.cat([below, counted.sum()[None]]).diff(prepend=below.new_zeros(1))


def count_equal_bins(values: Tensor, bins: int = BINS) -> tuple[Tensor, Tensor]:
    """Counts the finite values in bins of equal width; returns counts [bins] and edges [bins+1], on the CPU.

    If all values are equal, there is one bin of width 1. Without finite values, both results are empty.
    """
    values = values[values.isfinite()].double().cpu()
    if not len(values):
        return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.double)
    low, high = values.min(), values.max()
    if low == high:
        return torch.tensor([len(values)]), torch.stack([low - 0.5, low + 0.5])
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.double) * (high - low) + low
    return count_bins(values, edges), edges
