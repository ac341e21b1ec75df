"""make_experience: from what the policy answered to what PPO learns from.

Departures from the paper's bare algorithm, all switchable: the score is clipped after the missing-stop penalty, the KL to the reference
is charged per token inside the reward, and advantages are whitened over the whole rollout (all ranks), not per minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ops.kl import approx_kl
from ppo_ds.ops.losses import rollout_is_weights
from ppo_ds.ppo.advantages import CriticEstimator, Estimator, ScorePosition, Whitening
from ppo_ds.ppo.batching import all_gather_rows
from ppo_ds.ppo.reward_shaping import ScoreShaper
from ppo_ds.ppo.scoring import score_both, score_states, score_tokens, scoring_plan
from ppo_ds.training.metrics import MetricSums
from ppo_ds.training.timing import PhaseTimer
from ppo_ds.types import Experience, Metrics, ScoredRollout, Sequences


@dataclass(frozen=True)
class KLCharge:
    """The KL to the reference as a part of the reward."""

    in_reward: bool
    estimator: str


@dataclass(frozen=True)
class Correction:
    """Importance weights of the decode backend: ops/losses.py, rollout_is_weights."""

    kind: str  # none | tis | icepop | seq_mask_tis
    low: float
    high: float


def logprobs_of(model: TrainedModel | FrozenModel) -> Callable[[Sequences], Tensor]:
    """Sequences [b,T] -> log-probs [b,R] by the model's own forward."""
    return lambda micro: model(micro.ids, micro.attention_mask, micro.response_width)[0]


def values_of(critic: TrainedModel) -> Callable[[Sequences], Tensor]:
    """Sequences [b,T] -> values [b,S] by a critic of its own."""
    return lambda micro: critic(micro.ids, micro.attention_mask, micro.response_width)


def shared_values_of(actor: TrainedModel) -> Callable[[Sequences], Tensor]:
    """Sequences [b,T] -> values [b,S] by the actor's value head."""
    return lambda micro: actor(micro.ids, micro.attention_mask, micro.response_width).values


def both_of(actor: TrainedModel) -> Callable[[Sequences], tuple[Tensor, Tensor]]:
    """Sequences [b,T] -> log-probs [b,R] and values [b,S] of one forward."""

    def forward(micro: Sequences) -> tuple[Tensor, Tensor]:
        out = actor(micro.ids, micro.attention_mask, micro.response_width)
        return out.logprobs, out.values

    return forward


def without_stops(rollout: ScoredRollout, stop_token_ids: tuple[int, ...]) -> ScoredRollout:
    """End tokens are no longer actions; they stay attended to. (zysNLP always, DeepSpeed-Chat where the pad token ends answers.)"""
    answers = rollout.ids[:, rollout.prompt_width :]
    ended = torch.isin(answers, torch.tensor(stop_token_ids, dtype=answers.dtype)) & rollout.finished[:, None]
    last = torch.arange(rollout.response_width) == rollout.response_lengths[:, None] - 1
    return replace(rollout, response_mask=rollout.response_mask & ~(ended & last))


@dataclass(kw_only=True)
class ExperienceMaker:
    actor: TrainedModel
    early: bool  # the actor is asked for old log-probs; else the update's own forward is the first, and gives them (learner.py)
    reference: FrozenModel | None  # None: nobody asks for the KL
    values: Callable[[Sequences], Tensor] | None  # None: no critic
    one_trunk: bool  # the forward that gives old log-probs gives the values too
    world: World
    token_budget: int
    packed: bool  # the models take rows without padding
    hidden_stops: tuple[int, ...]  # end tokens that are no actions
    old_policy: (
        Callable[[], AbstractContextManager[None]] | None
    )  # inside, the actor is the lagging copy; None: it is the old policy itself
    shaper: ScoreShaper
    kl: KLCharge
    place: ScorePosition
    estimator: Estimator | CriticEstimator
    whitening: Whitening
    group_size: int
    correction: Correction
    timer: PhaseTimer

    @torch.no_grad()
    def __call__(self, rollout: ScoredRollout, kl_coef: float) -> tuple[Experience, Metrics]:
        """The rollout of this rank -> the experience of all ranks, and what was seen on the way. A collective."""
        if self.hidden_stops:
            rollout = without_stops(rollout, self.hidden_stops)
        plan = scoring_plan(rollout, self.token_budget, self.world, self.packed)
        said = self._actors(rollout, plan) | self._references(rollout, plan)
        with self.timer("advantages"):
            shaped, unclipped = self.shaper(rollout)
            charge, states = self._charge(said, rollout, kl_coef), self.place.states(rollout)
            rewards = self.place.rewards(shaped, rollout, charge, 1.0, rollout.token_scores)
            weights = self._weights(said, rollout)
        judged, raw = self._judged(said, rewards, shaped, rollout, plan)
        made = Experience(
            ids=rollout.ids,
            attention_mask=rollout.attention_mask,
            response_mask=rollout.response_mask,
            **(said | judged),
            finished=rollout.finished,
            decode_logprobs=rollout.logprobs,
            rewards=rewards,
            weights=weights,
            scores=rollout.scores,
        )
        totals = rewards.masked_fill(~states, 0.0).sum(
            1
        )  # what is paid where no state is (zysNLP's code) is lost
        seen = self._seen(
            rollout,
            shaped != unclipped,
            totals,
            -charge.masked_fill(~states[:, :-1], 0.0).sum(1),
            weights,
            raw,
        )
        return all_gather_rows(made, self.world), seen

    @torch.no_grad()
    def kl_now(self, experience: Experience) -> Metrics:
        """k1 of the actor to the reference per token, as the rollout had it and as the actor is by now. ``experience`` is that of all ranks."""
        mine = experience.select(
            torch.arange(len(experience)).chunk(self.world.size)[self.world.rank]
        ).trimmed()
        logprobs = self._over(
            scoring_plan(mine, self.token_budget, self.world, self.packed), mine, logprobs_of(self.actor)
        )
        sums = MetricSums()
        sums.add_mean("kl/before_update", mine.logprobs - mine.ref_logprobs, mine.response_mask)
        sums.add_mean("kl/after_update", logprobs - mine.ref_logprobs, mine.response_mask)
        return sums.reduced(self.world)

    def _actors(self, rollout: ScoredRollout, plan: list[Tensor]) -> dict[str, Tensor]:
        """The columns of an ActorExperience, [B,R] each, or none; also the values [B,S] where the same forward gives them."""
        if not self.early:
            return {}
        with self.timer("old_logprobs"):
            if self.one_trunk:
                logprobs, values = score_both(both_of(self.actor), rollout, plan)
                said = {"logprobs": logprobs, "values": values}
            else:
                said = {
                    "logprobs": self._over(plan, rollout, logprobs_of(self.actor))
                }  # log pi_old(a|s), training engine, dropout 0
            if fault("logprob"):
                said["logprobs"][0, 0] = math.nan
            return said | {
                "old_logprobs": self._lagged_logprobs(rollout, plan) if self.old_policy else said["logprobs"]
            }

    def _lagged_logprobs(self, rollout: ScoredRollout, plan: list[Tensor]) -> Tensor:
        with self.old_policy():
            return self._over(plan, rollout, logprobs_of(self.actor))

    def _references(self, rollout: ScoredRollout, plan: list[Tensor]) -> dict[str, Tensor]:
        """The column of a ReferenceExperience, or none."""
        if self.reference is None:
            return {}
        with self.timer("ref_logprobs"), self.reference.resident():
            return {"ref_logprobs": self._over(plan, rollout, logprobs_of(self.reference))}  # log pi_ref(a|s)

    def _charge(self, said: dict[str, Tensor], rollout: ScoredRollout, kl_coef: float) -> Tensor:
        """[B,R]: what the KL takes off the reward of each token."""
        if not self.kl.in_reward:
            return torch.zeros(rollout.response_mask.shape)
        return kl_coef * approx_kl(said["logprobs"], said["ref_logprobs"], self.kl.estimator)

    def _values(self, said: dict[str, Tensor], rollout: ScoredRollout, plan: list[Tensor]) -> Tensor:
        """V(s) [B,S]."""
        if "values" in said:
            return said["values"]
        with self.timer("values"):
            return score_states(self.values, rollout, plan)

    def _judged(
        self,
        said: dict[str, Tensor],
        rewards: Tensor,
        shaped: Tensor,
        rollout: ScoredRollout,
        plan: list[Tensor],
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The columns that tell how good the answers were, and the advantages [B,R] before they are whitened."""
        mask = rollout.response_mask
        if self.values is None:
            with self.timer("advantages"):
                raw = self.estimator(rewards, rollout, self.place.states(rollout), shaped)
                return {"advantages": self._whitened(raw, mask)}, raw
        values = self._values(said, rollout, plan)
        with self.timer("advantages"):
            judged = self.estimator(rewards, values, rollout)
            columns = {"values": values, "returns": judged.returns, "value_mask": judged.mask}
            return columns | {"advantages": self._whitened(judged.advantages, mask)}, judged.advantages

    def _whitened(self, raw: Tensor, mask: Tensor) -> Tensor:
        return self.whitening.in_rollout(raw, mask, self.group_size, self.world.sum)

    def _weights(self, said: dict[str, Tensor], rollout: ScoredRollout) -> Tensor:
        how = self.correction
        if how.kind == "none":
            return torch.ones(rollout.response_mask.shape)
        return rollout_is_weights(
            said["logprobs"], rollout.logprobs, rollout.response_mask, how.kind, how.low, how.high
        )

    def _seen(
        self,
        rollout: ScoredRollout,
        clipped: Tensor,
        totals: Tensor,
        kl_penalties: Tensor,
        weights: Tensor,
        raw_advantages: Tensor,
    ) -> Metrics:
        """What the experience itself no longer tells: the parts of the rewards, advantages before whitening.

        clipped, totals, kl_penalties [B]; weights, raw_advantages [B,R]. A collective.
        """
        mask = rollout.response_mask
        sums = MetricSums()
        sums.add_mean("reward/clipped_frac", clipped)
        sums.add_mean("reward/total_mean", totals)
        sums.add_mean("reward/kl_penalty_mean", kl_penalties)
        for name in rollout.components[0]:
            sums.add_mean(
                f"reward/component/{name}_mean", torch.tensor([parts[name] for parts in rollout.components])
            )
        if self.correction.kind != "none":
            sums.add_mean("parity/weight_mean", weights, mask)
        sums.add_spread("adv", raw_advantages, mask)
        sums.add_max("adv/max_abs", raw_advantages.abs().max())
        return sums.reduced(self.world)

    def _over(
        self, plan: list[Tensor], sequences: Sequences, forward: Callable[[Sequences], Tensor]
    ) -> Tensor:
        return score_tokens(forward, sequences, plan)
