"""Forwards over a rollout: micro-batches by tokens, the same number of them on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.ops.batching import plan_forwards
from ppo_ds.types import Sequences

T = TypeVar("T")


def scoring_plan(sequences: Sequences, token_budget: int, world: World, packed: bool = False) -> list[Tensor]:
    """Row indices of each forward. ZeRO-3 gathers weights inside a forward, so a rank with fewer of them would hang the others.

    ``packed``: the models take rows without padding; what is planned for padded ones suits them too.
    """
    lengths = sequences.attention_mask.sum(1)
    alone = len(plan_forwards(lengths, token_budget, packed=packed))
    return plan_forwards(lengths, token_budget, at_least=world.max_int(alone), packed=packed)


def score_tokens(forward: Callable[[Sequences], Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """``forward`` ([b,T'] -> [b,R']) over all rows of ``sequences``: [B,R] float32 on the CPU, 0 beyond the end of each answer.

    Tokens that were generated but are no actions (an end token left out of the mask) have their number too.
    """
    return _tokens(_over(forward, sequences, plan), sequences, plan)


def score_states(forward: Callable[[Sequences], Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """The same for the states ([b,T'] -> [b,S']): [B,S], 0 beyond the state after each answer's last token."""
    return _states(_over(forward, sequences, plan), sequences, plan)


def score_both(
    forward: Callable[[Sequences], tuple[Tensor, Tensor]], sequences: Sequences, plan: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Tokens and states of a model whose one forward gives both."""
    found = _over(forward, sequences, plan)
    return _tokens([tokens for tokens, _ in found], sequences, plan), _states(
        [states for _, states in found], sequences, plan
    )


@torch.no_grad()
def _over(forward: Callable[[Sequences], T], sequences: Sequences, plan: list[Tensor]) -> list[T]:
    return [forward(sequences.select(rows).trimmed()) for rows in plan]


def _tokens(found: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    answered = sequences.attention_mask[:, sequences.prompt_width :]
    return spread(found, plan, torch.zeros(answered.shape)).masked_fill(~answered, 0.0)


def _states(found: list[Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    states = torch.arange(sequences.response_width + 1) <= sequences.response_lengths[:, None]
    return spread(found, plan, torch.zeros(states.shape)).masked_fill(~states, 0.0)


def spread(found: list[Tensor], plan: list[Tensor], out: Tensor) -> Tensor:
    """Writes what was ``found`` [b,R'] of the rows of each forward into ``out`` [B,R]. It leaves the device in one piece, after the last forward."""
    everything = torch.cat([columns.detach().float().flatten() for columns in found]).cpu()
    for rows, columns, piece in zip(
        plan, found, everything.split([columns.numel() for columns in found]), strict=True
    ):
        out[rows, : columns.shape[1]] = piece.view(columns.shape)
    return out
