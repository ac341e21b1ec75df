"""Defines the aggregation of losses: the keys of algo.loss, and the name of each function.

A function takes (loss [B,T], mask [B,T], totals) and returns a Share, see aggregation.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ppo_ds.config.types import Count, OneOf, Variants

LOSS_AGGREGATIONS: dict[str, type[LossConfig]] = {}
_HERE = "ppo_ds.algorithm.loss.aggregation"


class LossConfig(Variants):
    """Aggregation of the losses over a whole optimizer step, on all ranks."""

    tag = "agg"
    variants = LOSS_AGGREGATIONS
    function: ClassVar[str]  # dotted name

    agg: Annotated[str, OneOf(LOSS_AGGREGATIONS)] = "token_mean"
    """Aggregation of the token losses."""

    mask_truncated: bool = False
    """Excludes responses cut at the length limit from all losses (DAPO's overlong filtering), but not from
    baselines and whitening."""


class TokenMean(LossConfig):
    """Mean over all tokens."""

    agg: Literal["token_mean"] = "token_mean"
    function = f"{_HERE}.token_mean"


class SeqMeanTokenMean(LossConfig):
    """Mean over responses of the mean over their tokens."""

    agg: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"
    function = f"{_HERE}.seq_mean_token_mean"


class SeqMeanTokenSum(LossConfig):
    """Mean over responses of the sum over their tokens."""

    agg: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"
    function = f"{_HERE}.seq_mean_token_sum"


class TokenSumNorm(LossConfig):
    """Sum over all tokens, divided by a constant per response."""

    agg: Literal["token_sum_norm"] = "token_sum_norm"
    function = f"{_HERE}.token_sum_norm"
    norm: Count | None = None
    """Tokens per response in the divisor; null: sampling.max_new_tokens."""
