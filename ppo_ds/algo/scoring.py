"""Forwards over a rollout: micro-batches by tokens, the same number of them on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_ds.engine.world import World
from ppo_ds.ops.batching import plan_forwards
from ppo_ds.types import Sequences


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
    answered = sequences.attention_mask[:, sequences.prompt_width :]
    return _over(forward, sequences, plan, torch.zeros(answered.shape)).masked_fill(~answered, 0.0)


def score_states(forward: Callable[[Sequences], Tensor], sequences: Sequences, plan: list[Tensor]) -> Tensor:
    """The same for the states ([b,T'] -> [b,S']): [B,S], 0 beyond the state after each answer's last token."""
    states = torch.arange(sequences.response_width + 1) <= sequences.response_lengths[:, None]
    return _over(forward, sequences, plan, torch.zeros(states.shape)).masked_fill(~states, 0.0)


@torch.no_grad()
def _over(forward: Callable[[Sequences], Tensor], sequences: Sequences, plan: list[Tensor], out: Tensor) -> Tensor:
    return spread([forward(sequences.select(rows).trimmed()) for rows in plan], plan, out)


def spread(found: list[Tensor], plan: list[Tensor], out: Tensor) -> Tensor:
    """Writes what was ``found`` [b,R'] of the rows of each forward into ``out`` [B,R]. It leaves the device in one piece, after the last forward."""
    everything = torch.cat([columns.detach().float().flatten() for columns in found]).cpu()
    for rows, columns, piece in zip(plan, found, everything.split([columns.numel() for columns in found]), strict=True):
        out[rows, : columns.shape[1]] = piece.view(columns.shape)
    return out
