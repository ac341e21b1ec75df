"""make_experience: from what the policy answered to what PPO learns from.

Departures from the paper's bare algorithm, all switchable: the score is clipped after the missing-stop penalty, the KL to the reference
is charged per token inside the reward, and advantages are whitened over the whole rollout (all ranks), not per minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ppo_ds.algo.advantages import CriticEstimator, Estimator, ScorePlace, Whitening
from ppo_ds.algo.exchange import exchange
from ppo_ds.algo.metrics import MetricSums
from ppo_ds.algo.scoring import score_states, score_tokens, scoring_plan
from ppo_ds.algo.shaping import ScoreShaper
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.world import World
from ppo_ds.ops.kl import approx_kl
from ppo_ds.ops.losses import rollout_is_weights
from ppo_ds.types import CriticExperience, Experience, Metrics, ScoredRollout, Sequences


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


def without_stops(rollout: ScoredRollout, stop_token_ids: tuple[int, ...]) -> ScoredRollout:
    """End tokens are no longer actions; they stay attended to. (zysNLP always, DeepSpeed-Chat where the pad token ends answers.)"""
    answers = rollout.ids[:, rollout.prompt_width :]
    ended = torch.isin(answers, torch.tensor(stop_token_ids, dtype=answers.dtype)) & rollout.finished[:, None]
    last = torch.arange(rollout.response_width) == rollout.response_lengths[:, None] - 1
    return replace(rollout, response_mask=rollout.response_mask & ~(ended & last))


@dataclass(kw_only=True)
class ExperienceMaker:
    actor: TrainedModel
    reference: FrozenModel
    values: Callable[[Sequences], Tensor] | None  # None: no critic
    world: World
    token_budget: int
    hidden_stops: tuple[int, ...]  # end tokens that are no actions
    old_policy: Callable[[], AbstractContextManager[None]] | None  # inside, the actor is the lagging copy; None: it is the old policy itself
    shaper: ScoreShaper
    kl: KLCharge
    place: ScorePlace
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
        plan = scoring_plan(rollout, self.token_budget, self.world)
        with self.timer("old_logprobs"):
            logprobs = self._over(plan, rollout, logprobs_of(self.actor))  # log pi_old(a|s), training engine, dropout 0
            old_logprobs = self._lagged_logprobs(rollout, plan) if self.old_policy else logprobs
        with self.timer("ref_logprobs"), self.reference.resident():
            ref_logprobs = self._over(plan, rollout, logprobs_of(self.reference))  # log pi_ref(a|s)
        with self.timer("advantages"):
            shaped, unclipped = self.shaper(rollout)
            kl = approx_kl(logprobs, ref_logprobs, self.kl.estimator)
            charged = kl_coef if self.kl.in_reward else 0.0
            rewards = self.place.rewards(shaped, rollout, kl, charged, rollout.token_scores)
        columns = {f.name: getattr(rollout, f.name) for f in fields(Sequences)} | {
            "finished": rollout.finished,
            "logprobs": logprobs,
            "old_logprobs": old_logprobs,
            "ref_logprobs": ref_logprobs,
            "rewards": rewards,
            "weights": self._weights(rollout, logprobs),
            "scores": rollout.scores,
        }
        experience, raw = self._judged(columns, rewards, shaped, rollout, plan)
        seen = self._seen(rollout, shaped != unclipped, -charged * kl.masked_fill(~self.place.states(rollout)[:, :-1], 0.0).sum(1), logprobs, raw)
        return exchange(experience, self.world), seen

    @torch.no_grad()
    def kl_now(self, experience: Experience) -> Metrics:
        """k1 of the actor to the reference per token, as the rollout had it and as the actor is by now. ``experience`` is that of all ranks."""
        mine = experience.select(torch.arange(len(experience)).chunk(self.world.size)[self.world.rank]).trimmed()
        logprobs = self._over(scoring_plan(mine, self.token_budget, self.world), mine, logprobs_of(self.actor))
        sums = MetricSums()
        sums.add_mean("kl/before_update", mine.logprobs - mine.ref_logprobs, mine.response_mask)
        sums.add_mean("kl/after_update", logprobs - mine.ref_logprobs, mine.response_mask)
        return sums.reduced(self.world)

    def _lagged_logprobs(self, rollout: ScoredRollout, plan: list[Tensor]) -> Tensor:
        with self.old_policy():
            return self._over(plan, rollout, logprobs_of(self.actor))

    def _judged(
        self, columns: dict[str, Tensor], rewards: Tensor, shaped: Tensor, rollout: ScoredRollout, plan: list[Tensor]
    ) -> tuple[Experience, Tensor]:
        """The experience, and the advantages [B,R] before they are whitened."""
        mask = rollout.response_mask
        if self.values is None:
            with self.timer("advantages"):
                raw = self.estimator(rewards, rollout, self.place.states(rollout), shaped)
                return Experience(**columns, advantages=self._whitened(raw, mask)), raw
        with self.timer("values"):
            values = score_states(self.values, rollout, plan, self.world.device)  # V(s)
        with self.timer("advantages"):
            judged = self.estimator(rewards, values, rollout)
            advantages = self._whitened(judged.advantages, mask)
            made = CriticExperience(**columns, advantages=advantages, values=values, returns=judged.returns, value_mask=judged.mask)
            return made, judged.advantages

    def _whitened(self, raw: Tensor, mask: Tensor) -> Tensor:
        return self.whitening.in_rollout(raw, mask, self.group_size, self.world.sum)

    def _weights(self, rollout: ScoredRollout, logprobs: Tensor) -> Tensor:
        how = self.correction
        if how.kind == "none":
            return torch.ones_like(logprobs)
        return rollout_is_weights(logprobs, rollout.logprobs, rollout.response_mask, how.kind, how.low, how.high)

    def _seen(self, rollout: ScoredRollout, clipped: Tensor, kl_penalties: Tensor, logprobs: Tensor, raw_advantages: Tensor) -> Metrics:
        """What the experience itself no longer tells: the parts of the rewards, the gap to generation, advantages before whitening.

        clipped, kl_penalties [B]; logprobs, raw_advantages [B,R]. A collective.
        """
        mask = rollout.response_mask
        sums = MetricSums()
        sums.add_mean("reward/clipped_frac", clipped)
        sums.add_mean("reward/kl_penalty_mean", kl_penalties)
        for name in rollout.components[0]:
            sums.add_mean(f"reward/component/{name}_mean", torch.tensor([parts[name] for parts in rollout.components]))
        gap = (rollout.logprobs - logprobs).abs().masked_fill(~mask, 0.0)
        sums.add_mean("parity/logp_abs_diff_mean", gap, mask)
        sums.add_max("parity/logp_abs_diff_max", gap.max())
        if self.correction.kind != "none":
            sums.add_mean("parity/weight_mean", self._weights(rollout, logprobs), mask)
        sums.add_spread("adv", raw_advantages, mask)
        sums.add_max("adv/max_abs", raw_advantages.abs().max())
        return sums.reduced(self.world)

    def _over(self, plan: list[Tensor], sequences: Sequences, forward: Callable[[Sequences], Tensor]) -> Tensor:
        return score_tokens(forward, sequences, plan, self.world.device)
