"""Forwards over a rollout: micro-batches by tokens, the same number of them on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_ds.engine.world import World
from ppo_ds.ops.batching import plan_microbatches
from ppo_ds.types import Sequences


def scoring_plan(sequences: Sequences, token_budget: int, world: World) -> list[Tensor]:
    """Row indices of each forward. ZeRO-3 gathers weights inside a forward, so a rank with fewer of them would hang the others."""
    prompts, responses = sequences.prompt_lengths, sequences.response_lengths
    alone = len(plan_microbatches(prompts, responses, token_budget))
    return plan_microbatches(prompts, responses, token_budget, at_least=world.max_int(alone))


@torch.no_grad()
def score_tokens(forward: Callable[[Sequences], Tensor], sequences: Sequences, plan: list[Tensor], device: torch.device) -> Tensor:
    """``forward`` ([b,T'] -> [b,R']) over all rows of ``sequences``: [B,R] float32 on the CPU, 0 outside the response mask."""
    out = torch.zeros(sequences.response_mask.shape)
    for rows in plan:
        micro = sequences.select(rows).trimmed()
        out[rows, : micro.response_width] = forward(micro.to(device)).float().cpu()
    return out.masked_fill(~sequences.response_mask, 0.0)
