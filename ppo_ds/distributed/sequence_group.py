"""Ulysses sequence parallelism: the tokens of a forward are divided among the ranks of a group.

Each rank runs all layers on its tokens. An all-to-all before attention gives each rank all tokens for its
share of the heads; one after attention gives it all heads for its own tokens (Jacobs et al. 2023; DeepSpeed's
``DistributedAttention``).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor


class _Sum(torch.autograd.Function):
    """Sums a tensor over a group. The backward sums the gradients over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.forward(ctx, gradient, ctx.group), None


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class SequenceGroup:
    """The group of this rank when the ranks are divided into groups of ``size`` consecutive ranks.

    All ranks must create this object. All ranks of the group must call each method.
    """

    def __init__(self, rank: int, ranks: int, size: int, timeout: timedelta):
        self.size, self.rank = size, rank % size  # the rank within the group
        for first in range(0, ranks, size):
            group = dist.new_group(list(range(first, first + size)), timeout=timeout)
            if first <= rank < first + size:
                self._group = group
        self._exchange = DistributedAttention(
            lambda query, key, value, compute: compute(query, key, value),
            self._group,
            scatter_idx=2,
            gather_idx=1,
        )

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over the group; differentiable."""
        total: Tensor = _Sum.apply(x, self._group)
        return total

    def attention(self, compute: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes attention [b,t,heads,d] of this rank's tokens to all tokens of the group; differentiable.

        query is [b,t,heads,d], key and value are [b,t,groups,d]; ``size`` divides heads and groups.
        ``compute`` is called with all tokens of the group for a share of the heads, in the same layout.
        """
        return self._exchange(query, key, value, 0, None, compute)
