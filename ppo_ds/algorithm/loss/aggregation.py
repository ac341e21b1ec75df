"""Aggregation of token losses over a whole optimizer step.

A micro-batch without any action has a loss of 0 with zero gradients, not NaN, because its rank must still
run the same backward as the other ranks.

Metrics of a loss are detached float64 statistics of one micro-batch. Those of shape [2] (sum and count of a
mean) and [5] (input of explained_variance()) add up over micro-batches and ranks. 0-dim ones are maxima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_ds.ops.masked import Reduce, masked_mean, masked_sum


@dataclass
class BatchTotals:
    """Counts of one optimizer step over all ranks and micro-batches."""

    tokens: float
    sequences: float  # sequences with at least one token
    dp_size: int = 1
    norm: float | None = None  # the constant divisor of the aggregation "token_sum_norm"
    positive_tokens: float = 0.0  # tokens of the correct responses, for algo.positive_nll


def batch_totals(
    masks: Iterable[Tensor], reduce: Reduce | None = None, dp_size: int = 1, norm: float | None = None
) -> BatchTotals:
    """Counts the tokens and sequences in all ``masks`` [B,T]; ``reduce`` sums the counts over ranks."""
    counts = torch.stack([torch.stack([_count(mask), _rows(mask).sum()]).double() for mask in masks]).sum(
        dim=0
    )
    tokens, sequences = (reduce(counts) if reduce else counts).tolist()
    return BatchTotals(tokens, sequences, dp_size, norm)


class Share(NamedTuple):
    """The contribution of one micro-batch to an aggregated loss."""

    total: Tensor  # 0-dim: the micro-batch's part of the numerator
    weight: Tensor  # 0-dim: the micro-batch's part of the divisor; adds up over micro-batches and ranks
    divisor: float | None  # the divisor of the whole optimizer step; None without totals


def token_mean(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over all tokens by the number of tokens."""
    return Share(masked_sum(loss, mask), _count(mask), totals.tokens if totals else None)


def seq_mean_token_mean(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Averages the loss over the tokens of each sequence, then over the sequences."""
    # the eps of OpenRLHF and verl, for equal results in float64; it has no effect in float32
    total = masked_mean(loss, mask, dim=-1, eps=1e-8).sum()
    return Share(total, _rows(mask).sum(), totals.sequences if totals else None)


def seq_mean_token_sum(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over all tokens by the number of sequences."""
    return Share(masked_sum(loss, mask), _rows(mask).sum(), totals.sequences if totals else None)


def token_sum_norm(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over all tokens by ``totals.norm``; without totals, by the width T."""
    total, count = masked_sum(loss, mask), _count(mask)
    if totals is None:
        return Share(total, torch.full_like(count, mask.shape[-1]), None)
    assert totals.norm is not None, (
        "token_sum_norm needs BatchTotals.norm: the width of a micro-batch depends on the split"
    )
    return Share(total, count.double() * (totals.norm / max(totals.tokens, 1.0)), totals.norm)


Aggregation = Callable[[Tensor, Tensor, BatchTotals | None], Share]


def aggregate(loss: Tensor, mask: Tensor, agg: Aggregation, totals: BatchTotals | None = None) -> Tensor:
    """Aggregates a per-token loss [B,T] to a scalar. Sequences without tokens do not count.

    With ``totals``, returns dp_size times this micro-batch's share of the optimizer step's loss. The factor
    cancels the averaging over ranks (DeepSpeed: ``engine.backward(loss, scale_wrt_gas=False)``).
    """
    share = agg(loss, mask, totals)
    if totals is None or share.divisor is None:
        return share.total / share.weight.clamp(min=1)
    return share.total * (totals.dp_size / share.divisor if share.divisor > 0 else 0.0)


def loss_parts(loss: Tensor, mask: Tensor, agg: Aggregation, totals: BatchTotals | None) -> Tensor:
    """Returns the loss as a metric, [2]: the numerator and the micro-batch's share of the divisor."""
    share = agg(loss.detach().double(), mask, totals)
    return torch.stack([share.total, share.weight.double()])


def mean_parts(x: Tensor, mask: Tensor) -> Tensor:
    """Returns (sum over tokens, number of tokens), [2] in float64."""
    return torch.stack([masked_sum(x.detach().double(), mask), _count(mask).double()])


def _count(mask: Tensor) -> Tensor:
    return mask.bool().sum()


def _rows(mask: Tensor) -> Tensor:
    return mask.bool().any(dim=-1)
