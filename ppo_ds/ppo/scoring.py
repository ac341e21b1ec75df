"""Scores of a rollout, which may be computed while the models compute log-probs and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from ppo_ds.background.pending import Pending, wait_on_all_ranks
from ppo_ds.distributed.world import World
from ppo_ds.types import Rollout, ScoredRollout, Scores

# a function that starts to score a rollout
StartScoring = Callable[[Rollout], Pending[Scores]]


def wait_for_scores(pending: Pending[Scores], world: World, check: Callable[[], None]) -> Scores:
    """Waits until the scores are known on every rank; a collective if they are computed in the background."""
    if not pending.tasks:
        return pending.result()
    return wait_on_all_ranks(pending, world, check)


def scored(rollout: Rollout, scores: Scores) -> ScoredRollout:
    """Combines a rollout and its scores into a ScoredRollout on the CPU.

    Scores of tokens that are no actions, such as masked end tokens, move to the action before them, or to the
    first action. A row without actions loses them.
    """
    mask, token_scores = rollout.response_mask.cpu(), scores.per_token.cpu().float()
    positions = torch.arange(mask.shape[1]).expand(mask.shape)
    before = torch.where(mask, positions, -1).cummax(1).values
    first = mask.long().argmax(1, keepdim=True)
    target = torch.where(before < 0, first, before)
    moved = torch.zeros_like(token_scores).scatter_add(1, target, token_scores.masked_fill(mask, 0.0))
    token_scores = (token_scores + moved).masked_fill(~mask, 0.0)
    columns = {name: column.tolist() for name, column in scores.components.items()}
    components = tuple({name: column[i] for name, column in columns.items()} for i in range(len(rollout)))
    return ScoredRollout(
        **{field.name: getattr(rollout, field.name) for field in fields(Rollout)},
        scores=scores.total.cpu().float(),
        token_scores=token_scores,
        components=components,
    )


def scores_of(rollout: ScoredRollout) -> Scores:
    """Returns the scores that a rollout holds."""
    components = {
        name: torch.tensor([parts[name] for parts in rollout.components]) for name in rollout.components[0]
    }
    return Scores(rollout.scores, rollout.token_scores, components)
