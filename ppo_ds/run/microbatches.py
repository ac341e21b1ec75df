"""Divides rows among ranks and forward passes of at most a given number of tokens.

Every rank runs the same number of forwards, since ZeRO-3 gathers weights inside a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_ds.compute.batching import padded_tokens, plan_forwards, plan_share
from ppo_ds.distributed.heartbeat import counting
from ppo_ds.distributed.world import World
from ppo_ds.types import PreferencePairs, Sequences

S = TypeVar("S", bound=Sequences)


def microbatch_rows(
    minibatch: Sequences, token_budget: int, world: World, packed: bool = False
) -> list[Tensor]:
    """Returns the row indices of each forward over this rank's share of a minibatch. Not a collective."""
    lengths, token_budget = minibatch.attention_mask.sum(1), token_budget * world.sequence_ranks
    return plan_share(lengths, token_budget, world.data_rank, world.data_size, packed)


def microbatches(minibatch: S, token_budget: int, world: World, packed: bool = False) -> list[S]:
    """Returns the rows of each forward over this rank's share of a minibatch, without needless padding."""
    plan = microbatch_rows(minibatch, token_budget, world, packed)
    return [minibatch.select(rows).trimmed() for rows in plan]


def padding(micros: Iterable[Sequences | PreferencePairs], packed: bool) -> Tensor:
    """Returns [padding tokens, all tokens] of the forwards over ``micros``: [2] long, on the CPU."""
    counts = torch.zeros(2, dtype=torch.long)
    for rows in micros:
        lengths = rows.lengths.flatten() if isinstance(rows, PreferencePairs) else rows.attention_mask.sum(1)
        tokens = padded_tokens(lengths, packed)
        counts += torch.tensor([tokens - int(lengths.sum()), tokens])
    return counts


def scoring_plan(sequences: Sequences, token_budget: int, world: World, packed: bool = False) -> list[Tensor]:
    """Returns the row indices of each forward over ``sequences``, rows of this rank or sequence group.

    All ranks must call this and get the same number of forwards. ``packed``: whether the models take rows
    without padding.
    """
    lengths, token_budget = sequences.attention_mask.sum(1), token_budget * world.sequence_ranks
    plan = plan_forwards(lengths, token_budget, packed=packed)
    count = world.max_int(len(plan))
    return plan if count == len(plan) else plan_forwards(lengths, token_budget, count, packed)


def filled(sequences: S, ranks: int) -> S:
    """Appends copies of the last row with an empty response mask until ``ranks`` divides the row count."""
    count, missing = len(sequences), -len(sequences) % ranks
    rows = sequences.select(torch.cat([torch.arange(count), torch.full((missing,), count - 1)]))
    mask = rows.response_mask.clone()
    mask[count:] = False
    return replace(rows, response_mask=mask)


@torch.no_grad()
def forward_rows(
    model: Callable[..., Any], sequences: Sequences, plan: list[Tensor], **options: Any
) -> list[Any]:
    """Runs ``model`` with ``options`` on the rows of each entry of ``plan`` and returns its outputs."""
    outputs = []
    with counting(len(plan), "forwards") as done:
        for number, rows in enumerate(plan, start=1):
            micro = sequences.select(rows).trimmed()
            outputs.append(model(micro.ids, micro.attention_mask, micro.response_width, **options))
            done(number)
    return outputs
