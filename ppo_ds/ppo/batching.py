"""Experience is made where it was rolled out and learned from everywhere: every rank gets all rows.

A rollout's numbers are small beside a model (a few MB for 512 answers of 1,000 tokens). With all of them at hand, one seeded
permutation of the *global* rows forms the minibatches, each rank takes a share of equal length, and totals and micro-batch counts are
known without asking anybody. So the number of ranks changes nothing but speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.ops.batching import balance_ranks, plan_forwards
from ppo_ds.types import Sequences

S = TypeVar("S", bound=Sequences)


def all_gather_rows(rows: S, world: World) -> S:
    """The rows of all ranks, in the order of the ranks, on every rank."""
    widest = rows.resized(world.max_int(rows.prompt_width), world.max_int(rows.response_width))
    tensors = {name: world.concat(column).to(column.device) for name, column in widest.tensors().items()}
    objects = {
        name: tuple(item for part in world.gather_objects(column) for item in part)
        for name, column in widest.objects().items()
    }
    return replace(widest, **tensors, **objects)


def concatenated(parts: list[S]) -> S:
    """Rows one after the other, at the width of the widest."""
    prompt, response = max(part.prompt_width for part in parts), max(part.response_width for part in parts)
    wide = [part.resized(prompt, response) for part in parts]
    tensors = {name: torch.cat([part.tensors()[name] for part in wide]) for name in wide[0].tensors()}
    objects = {name: sum((part.objects()[name] for part in wide), ()) for name in wide[0].objects()}
    return replace(wide[0], **tensors, **objects)


def minibatches(n_rows: int, minibatch_size: int, generator: torch.Generator) -> Iterable[Tensor]:
    """Returns the row indices of each optimizer step of one epoch: a permutation of all rows in equal parts."""
    assert n_rows % minibatch_size == 0, f"{n_rows} rows do not make minibatches of {minibatch_size}"
    return torch.randperm(n_rows, generator=generator).split(minibatch_size)


def microbatch_rows(
    minibatch: Sequences, token_budget: int, world: World, packed: bool = False
) -> list[Tensor]:
    """This rank's share of a minibatch, as the rows of each forward: at most ``token_budget`` tokens in one, as many of them on every rank.

    ``packed``: see scoring_plan.
    """
    lengths = minibatch.attention_mask.sum(1)
    shares = balance_ranks(lengths, world.size)
    count = max(len(plan_forwards(lengths[rows], token_budget, packed=packed)) for rows in shares)
    mine = shares[world.rank]
    return [mine[rows] for rows in plan_forwards(lengths[mine], token_budget, at_least=count, packed=packed)]


def microbatches(minibatch: S, token_budget: int, world: World, packed: bool = False) -> list[S]:
    """The same as rows cut to their own longest."""
    return [
        minibatch.select(rows).trimmed() for rows in microbatch_rows(minibatch, token_budget, world, packed)
    ]
