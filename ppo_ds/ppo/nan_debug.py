"""Locates the first non-finite tensor of a PPO optimizer step by replaying it. Weights do not change."""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from ppo_ds.ppo.health import NonFiniteStep
from ppo_ds.ppo.learner import Learner
from ppo_ds.run.failure_dump import Origin, origin_of
from ppo_ds.run.microbatches import microbatch_rows
from ppo_ds.run.nan_debug import CheckedOutput, ReplayedRow, gathered_rows, replay_rows
from ppo_ds.types import Experience

LOGPROBS = CheckedOutput("log-prob of token {}", attrgetter("logprobs"))
VALUES = CheckedOutput("value of state {} of the critic", lambda values: values)


def locate_nonfinite(
    learner: Learner, minibatch: Experience, kl_coef: float, critic_only: bool
) -> list[ReplayedRow]:
    """Replays every row of ``minibatch`` and returns the results in the order of the rows. A collective.

    Weights, optimizers and counters do not change.
    """
    world = learner.world
    plan = microbatch_rows(minibatch, 1, world)
    micros = [minibatch.select(part).trimmed() for part in plan]
    rows = [ReplayedRow(int(part), world.rank) for part in plan]
    totals, value_totals = learner.totals(minibatch)
    if not critic_only:
        policy_loss = partial(learner.policy_loss, totals=totals, value_totals=value_totals, kl_coef=kl_coef)
        replay_rows("actor", learner.actor, LOGPROBS, policy_loss, micros, rows)
    if learner.critic is not None:
        value_loss = partial(learner.value_loss, critic=learner.critic, totals=value_totals)
        replay_rows("critic", learner.critic, VALUES, value_loss, micros, rows)
    return gathered_rows(rows, world)


def find_origin(learner: Learner, skipped: NonFiniteStep) -> Origin:
    """Finds the tensor and the row that caused a non-finite step, if a replay reproduces it. A collective."""
    if skipped.row is not None:
        return Origin(skipped.what[0], skipped.rank, skipped.rows.tolist().index(skipped.row))
    replayed = locate_nonfinite(learner, skipped.minibatch, skipped.kl_coef, skipped.critic_only)
    return origin_of(replayed, skipped.what)
