"""Exchanges the rows of a rollout among ranks, forms minibatches, transforms them and collects outputs.

Every rank receives all rows. Minibatches come from one seeded permutation of all rows of all ranks, so the
number of ranks affects only the speed, and totals are known without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.policy.selection import top_entropy_tokens
from ppo_ds.distributed.world import World
from ppo_ds.types import Experience, Sequences, to_device

S = TypeVar("S", bound=Sequences)


def all_gather_rows(rows: S, world: World) -> S:
    """Returns the rows of all ranks, in the order of the ranks, on every rank. All ranks must call this."""
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
    """Shuffles the row indices; returns those of each optimizer step of one epoch."""
    assert n_rows % minibatch_size == 0, f"{n_rows} rows do not make minibatches of {minibatch_size}"
    return torch.randperm(n_rows, generator=generator).split(minibatch_size)


def scatter_tokens(parts: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """Assembles per-token outputs [B,R], float32 on the CPU, from the ``parts`` [b,R'] of all forwards.

    ``plan`` holds the row indices of each forward. Positions after the end of a response are 0; an end token
    outside the response mask keeps its value.
    """
    responses = sequences.response_attention
    return scatter_rows(parts, plan, torch.zeros(responses.shape)).masked_fill(~responses, 0.0)


def scatter_states(parts: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """Assembles per-state outputs [B,S] as scatter_tokens does; columns beyond a row's final state are 0."""
    states = torch.arange(sequences.response_width + 1) <= sequences.response_lengths[:, None]
    return scatter_rows(parts, plan, torch.zeros(states.shape)).masked_fill(~states, 0.0)


def scatter_rows(parts: list[Tensor], plan: list[Tensor], out: Tensor) -> Tensor:
    """Writes ``parts`` [b,R'], one per entry of ``plan``, into the rows of ``out`` [B,R]; returns ``out``.

    The host waits for the device only once, after the last forward.
    """
    flat = torch.cat([part.detach().float().flatten() for part in parts]).cpu()
    pieces = flat.split([part.numel() for part in parts])
    for rows, part, piece in zip(plan, parts, pieces, strict=True):
        out[rows, : part.shape[1]] = piece.view(part.shape)
    return out


# A transform of an optimizer step: (its rows from all ranks, a generator) -> the same number of rows. The
# generator has the same state on every rank. It is used to select tokens, never to order the rows.
Transform = Callable[[Experience, torch.Generator], Experience]


def whitened(rows: Experience, _: torch.Generator, *, whitening: Whitening) -> Experience:
    """Whitens the advantages (`algo.advantage.whiten=minibatch`)."""
    return replace(rows, advantages=whitening.whiten(rows.advantages, rows.response_mask))


def without_truncated(rows: Experience, _: torch.Generator) -> Experience:
    """Removes the responses that did not end with a stop from the loss masks (Yu et al. 2025)."""
    ended = rows.finished[:, None]
    states = None if rows.value_mask is None else rows.value_mask & ended
    return replace(rows, response_mask=rows.response_mask & ended, value_mask=states)


def with_top_entropy(rows: Experience, _: torch.Generator, *, share: float) -> Experience:
    """Excludes tokens outside the ``share`` with the highest entropy from the policy loss (Wang et al. 2025).

    Other tokens still count in the divisor of the mean. Rows without entropies do not change.
    """
    if rows.entropy is None:
        return rows
    kept = top_entropy_tokens(rows.entropy, rows.response_mask, share)
    return replace(rows, weights=rows.weights.masked_fill(~kept, 0.0))


def with_selected(
    rows: Experience, generator: torch.Generator, *, selection: Callable[..., Tensor]
) -> Experience:
    """Adds the column ``selected`` (see PolicyConfig.selection) to rows that have log-probs."""
    if rows.logprobs is None:
        return rows
    selected = selection(rows.logprobs, rows.advantages, rows.response_mask, generator)
    return replace(rows, selected=selected)
