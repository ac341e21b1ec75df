"""Scores of a rollout, which may be computed while the models compute log-probs and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.ops.sequences import last_token_index
from ppo_ds.rewards.pending import Pending
from ppo_ds.types import Rollout, ScoredRollout, Scores

_POLL_SECONDS = 0.5  # interval at which ranks exchange their progress

# a function that starts to score a rollout
StartScoring = Callable[[Rollout], Pending[Scores]]


def wait_for_scores(pending: Pending[Scores], world: World, check: Callable[[], None]) -> Scores:
    """Waits until the scores are known on every rank. A collective if they are computed in the background.

    All ranks wait together and call ``check``, a collective that raises Abandoned on all ranks after a stop
    request. Each score that is completed on any rank counts as progress on all ranks, so that a slow reward
    is not taken for a hang.
    """
    if not pending.tasks:
        return pending.result()
    completed = 0
    try:
        while True:
            ready = pending.wait(_POLL_SECONDS)
            check()
            now, ranks_ready = world.sum(torch.tensor([pending.completed, ready])).tolist()
            if now > completed:
                heartbeat.beat()
            if ranks_ready == world.size:
                return pending.result()
            completed = now
    except BaseException:
        pending.cancel()
        raise


def scored(rollout: Rollout, scores: Scores) -> ScoredRollout:
    """Combines a rollout and its scores into a ScoredRollout on the CPU.

    Scores of tokens that are not actions, such as end tokens that were masked after scoring, move to the last
    action.
    """
    mask, token_scores = rollout.response_mask.cpu(), scores.per_token.cpu().float()
    at_last = torch.arange(mask.shape[1]) == last_token_index(mask)[:, None]
    moved = token_scores.masked_fill(mask, 0.0).sum(1, keepdim=True)
    token_scores = token_scores.masked_fill(~mask, 0.0) + torch.where(at_last, moved, 0.0)
    components = tuple(
        {name: float(column[i]) for name, column in scores.components.items()} for i in range(len(rollout))
    )
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
