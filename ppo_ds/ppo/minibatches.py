"""Exchanges the rows of a rollout among ranks, forms minibatches and collects the outputs of forwards.

Every rank receives all rows. One seeded permutation of the *global* rows forms the minibatches, so that
the number of ranks affects only the speed, and totals are known without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.types import Sequences, to_device

S = TypeVar("S", bound=Sequences)


def all_gather_rows(rows: S, world: World) -> S:
    """Returns the rows of all ranks, in the order of the ranks, on every rank. A collective."""
    widest = rows.resized(world.max_int(rows.prompt_width), world.max_int(rows.response_width))
    tensors = {
        name: world.concat(to_device(column, world.device)).to(column.device)
        for name, column in widest.tensors().items()
    }
    objects = {
        name: tuple(item for part in world.gather_objects(column) for item in part)
        for name, column in widest.objects().items()
    }
    return replace(widest, **tensors, **objects)


def concatenate(parts: list[S]) -> S:
    """Concatenates the rows of all ``parts``, padded to the widest prompt and response."""
    prompt, response = max(part.prompt_width for part in parts), max(part.response_width for part in parts)
    wide = [part.resized(prompt, response) for part in parts]
    tensors = {name: torch.cat([part.tensors()[name] for part in wide]) for name in wide[0].tensors()}
    objects = {name: sum((part.objects()[name] for part in wide), ()) for name in wide[0].objects()}
    return replace(wide[0], **tensors, **objects)


def minibatches(n_rows: int, minibatch_size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Splits a random permutation of all rows into the row indices of each optimizer step of one epoch."""
    assert n_rows % minibatch_size == 0, f"{n_rows} rows do not make minibatches of {minibatch_size}"
    return torch.randperm(n_rows, generator=generator).split(minibatch_size)


def scatter_tokens(parts: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """Assembles per-token outputs [B,R], float32 on the CPU, from the ``parts`` [b,R'] of all forwards.

    Positions beyond the end of a response are 0. A generated token that is not an action (an end token
    outside the mask) keeps its value.
    """
    responses = sequences.response_attention
    return scatter_rows(parts, plan, torch.zeros(responses.shape)).masked_fill(~responses, 0.0)


def scatter_states(parts: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """Assembles per-state outputs [B,S], float32 on the CPU, from the ``parts`` [b,S'] of all forwards.

    Positions beyond the state after the last token of a response are 0.
    """
    states = torch.arange(sequences.response_width + 1) <= sequences.response_lengths[:, None]
    return scatter_rows(parts, plan, torch.zeros(states.shape)).masked_fill(~states, 0.0)


def scatter_rows(parts: list[Tensor], plan: list[Tensor], out: Tensor) -> Tensor:
    """Writes ``parts`` [b,R'], one per entry of ``plan``, into the rows of ``out`` [B,R]; returns ``out``.

    The host waits only once, after the last forward.
    """
    flat = torch.cat([part.detach().float().flatten() for part in parts]).cpu()
    pieces = flat.split([part.numel() for part in parts])
    for rows, part, piece in zip(plan, parts, pieces, strict=True):
        out[rows, : part.shape[1]] = piece.view(part.shape)
    return out
