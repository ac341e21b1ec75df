"""Rows of a rollout over ranks, minibatches and forwards.

Experience is computed on the rank that generated it and learned from everywhere: every rank receives all
rows. They are small beside a model (a few MB for 512 responses of 1,000 tokens). With all of them at hand,
one seeded permutation of the *global* rows forms the minibatches, each rank takes a share of equal length,
and totals and micro-batch counts are known without communication. So the number of ranks changes nothing but
speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.ops.batching import balance_ranks, plan_forwards
from ppo_ds.types import Sequences

S = TypeVar("S", bound=Sequences)


def all_gather_rows(rows: S, world: World) -> S:
    """Returns the rows of all ranks, in the order of the ranks, on every rank. A collective."""
    widest = rows.resized(world.max_int(rows.prompt_width), world.max_int(rows.response_width))
    tensors = {name: world.concat(column).to(column.device) for name, column in widest.tensors().items()}
    objects = {
        name: tuple(item for part in world.gather_objects(column) for item in part)
        for name, column in widest.objects().items()
    }
    return replace(widest, **tensors, **objects)


def concatenate(parts: list[S]) -> S:
    """Returns the rows of all ``parts`` one after the other, at the width of the widest."""
    prompt, response = max(part.prompt_width for part in parts), max(part.response_width for part in parts)
    wide = [part.resized(prompt, response) for part in parts]
    tensors = {name: torch.cat([part.tensors()[name] for part in wide]) for name in wide[0].tensors()}
    objects = {name: sum((part.objects()[name] for part in wide), ()) for name in wide[0].objects()}
    return replace(wide[0], **tensors, **objects)


def minibatches(n_rows: int, minibatch_size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Returns the row indices of each optimizer step of one epoch: all rows, permuted, in equal parts."""
    assert n_rows % minibatch_size == 0, f"{n_rows} rows do not make minibatches of {minibatch_size}"
    return torch.randperm(n_rows, generator=generator).split(minibatch_size)


def microbatch_rows(
    minibatch: Sequences, token_budget: int, world: World, packed: bool = False
) -> list[Tensor]:
    """Returns the row indices of each forward over this rank's share of a minibatch.

    A forward has at most ``token_budget`` tokens, and every rank runs equally many. Every rank holds all rows
    of the minibatch, so this is no collective. ``packed``: see scoring_plan.
    """
    lengths = minibatch.attention_mask.sum(1)
    shares = balance_ranks(lengths, world.size)
    count = max(len(plan_forwards(lengths[rows], token_budget, packed=packed)) for rows in shares)
    mine = shares[world.rank]
    return [mine[rows] for rows in plan_forwards(lengths[mine], token_budget, at_least=count, packed=packed)]


def microbatches(minibatch: S, token_budget: int, world: World, packed: bool = False) -> list[S]:
    """Returns the rows of each forward over this rank's share of a minibatch, cut to their own longest."""
    plan = microbatch_rows(minibatch, token_budget, world, packed)
    return [minibatch.select(rows).trimmed() for rows in plan]


def scoring_plan(sequences: Sequences, token_budget: int, world: World, packed: bool = False) -> list[Tensor]:
    """Returns the row indices of each forward over this rank's own rows. A collective.

    Every rank runs equally many forwards: ZeRO-3 gathers weights inside a forward, so a rank with fewer of
    them would hang the others. ``packed``: the models take rows without padding; a plan for padded rows suits
    them too.
    """
    lengths = sequences.attention_mask.sum(1)
    alone = len(plan_forwards(lengths, token_budget, packed=packed))
    return plan_forwards(lengths, token_budget, at_least=world.max_int(alone), packed=packed)


@torch.no_grad()
def forward_rows(model: Callable[..., Any], sequences: Sequences, plan: list[Tensor]) -> list[Any]:
    """Runs ``model`` on the rows of each entry of ``plan`` and returns its outputs."""
    micros = (sequences.select(rows).trimmed() for rows in plan)
    return [model(micro.ids, micro.attention_mask, micro.response_width) for micro in micros]


def scatter_tokens(parts: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """Puts the numbers of response tokens, ``parts`` [b,R'] of each forward, at their rows: [B,R] float32 on
    the CPU.

    They are 0 beyond the end of each response. A generated token that is no action (an end token outside the
    mask) keeps its number.
    """
    responses = sequences.attention_mask[:, sequences.prompt_width :]
    return scatter_rows(parts, plan, torch.zeros(responses.shape)).masked_fill(~responses, 0.0)


def scatter_states(parts: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """Puts the numbers of states, ``parts`` [b,S'] of each forward, at their rows: [B,S] float32 on the CPU.

    They are 0 beyond the state after each response's last token.
    """
    states = torch.arange(sequences.response_width + 1) <= sequences.response_lengths[:, None]
    return scatter_rows(parts, plan, torch.zeros(states.shape)).masked_fill(~states, 0.0)


def scatter_rows(parts: list[Tensor], plan: list[Tensor], out: Tensor) -> Tensor:
    """Writes ``parts`` [b,R'], one for each entry of ``plan``, into the rows of ``out`` [B,R] and returns it.

    The numbers leave the device in one piece after the last forward, so that the host waits only once.
    """
    everything = torch.cat([part.detach().float().flatten() for part in parts]).cpu()
    pieces = everything.split([part.numel() for part in parts])
    for rows, part, piece in zip(plan, parts, pieces, strict=True):
        out[rows, : part.shape[1]] = piece.view(part.shape)
    return out
