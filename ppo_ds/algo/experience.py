"""make_experience: from what the policy answered to what PPO learns from.

Departures from the paper's bare algorithm, all switchable: the score is clipped after the missing-stop penalty, the KL to the reference
is charged per token inside the reward, and advantages are whitened over the whole rollout (all ranks), not per minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.algo.exchange import exchange
from ppo_ds.algo.metrics import MetricSums
from ppo_ds.algo.scoring import score_tokens, scoring_plan
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.world import World
from ppo_ds.ops.advantages import compute_gae, normalize_advantages
from ppo_ds.ops.kl import approx_kl
from ppo_ds.ops.rewards import shape_scores, token_rewards
from ppo_ds.types import Experience, Metrics, Reward, Rollout, Scores, Sequences


@dataclass(frozen=True)
class RewardShape:
    """How scores become token rewards."""

    kl_in_reward: bool
    kl_estimator: str
    clip: float | None
    missing_eos: str | None
    missing_eos_value: float


@dataclass(frozen=True)
class AdvantageShape:
    """How token rewards become advantages."""

    gamma: float
    lam: float
    lam_critic: float | None
    whiten: str


def logprobs_of(model: TrainedModel | FrozenModel):
    """Sequences [b,T] -> log-probs [b,R] by the model's own forward."""
    return lambda micro: model(micro.ids, micro.attention_mask, micro.response_width)[0]


def values_of(model: TrainedModel):
    """Sequences [b,T] -> values [b,R] of the states before each response token."""
    return lambda micro: model(micro.ids, micro.attention_mask, micro.response_width)


@dataclass(kw_only=True)
class ExperienceMaker:
    actor: TrainedModel
    reference: FrozenModel
    critic: TrainedModel
    reward: Reward
    world: World
    token_budget: int
    reward_shape: RewardShape
    advantage_shape: AdvantageShape
    timer: PhaseTimer

    @torch.no_grad()
    def __call__(self, rollout: Rollout, kl_coef: float) -> tuple[Experience, Metrics]:
        """The rollout of this rank -> the experience of all ranks, and what was seen on the way. A collective."""
        mask = rollout.response_mask
        plan = scoring_plan(rollout, self.token_budget, self.world)
        with self.timer("old_logprobs"):
            logprobs = self._over(plan, rollout, logprobs_of(self.actor))  # log pi_old(a|s), training engine, dropout 0
        with self.timer("ref_logprobs"), self.reference.resident():
            ref_logprobs = self._over(plan, rollout, logprobs_of(self.reference))  # log pi_ref(a|s)
        with self.timer("values"):
            values = self._over(plan, rollout, values_of(self.critic))  # V(s)
        with self.timer("reward"):
            scores = self.reward(rollout)  # r(x, y)
        with self.timer("advantages"):
            shaped = self._shaped(scores.total, rollout)
            kl = approx_kl(logprobs, ref_logprobs, self.reward_shape.kl_estimator)
            charged = kl_coef if self.reward_shape.kl_in_reward else 0.0
            rewards = token_rewards(shaped, mask, kl, charged, token_scores=scores.per_token)
            shape = self.advantage_shape
            raw, returns = compute_gae(rewards, values, mask, shape.gamma, shape.lam, lam_critic=shape.lam_critic)
            advantages = normalize_advantages(raw, mask, shape.whiten, reduce=self.world.sum)
            experience = Experience(
                ids=rollout.ids,
                attention_mask=rollout.attention_mask,
                response_mask=mask,
                finished=rollout.finished,
                logprobs=logprobs,
                ref_logprobs=ref_logprobs,
                values=values,
                rewards=rewards,
                advantages=advantages,
                returns=returns,
                scores=scores.total,
            )
        return exchange(experience, self.world), self._seen(rollout, scores, shaped, -charged * kl.sum(1), logprobs, raw)

    def _seen(self, rollout: Rollout, scores: Scores, shaped: Tensor, kl_penalties: Tensor, logprobs: Tensor, raw_advantages: Tensor) -> Metrics:
        """What the experience itself no longer tells: the parts of the rewards, the gap to generation, advantages before whitening.

        shaped, kl_penalties [B]; logprobs, raw_advantages [B,R]. A collective.
        """
        mask = rollout.response_mask
        sums = MetricSums()
        sums.add_mean("reward/clipped_frac", shaped != self._shaped(scores.total, rollout, clip=False))
        sums.add_mean("reward/kl_penalty_mean", kl_penalties)
        for name, column in scores.components.items():
            sums.add_mean(f"reward/component/{name}_mean", column)
        gap = (rollout.logprobs - logprobs).abs().masked_fill(~mask, 0.0)
        sums.add_mean("parity/logp_abs_diff_mean", gap, mask)
        sums.add_max("parity/logp_abs_diff_max", gap.max())
        sums.add_spread("adv", raw_advantages, mask)
        sums.add_max("adv/max_abs", raw_advantages.abs().max())
        return sums.reduced(self.world)

    def _over(self, plan: list[Tensor], sequences: Sequences, forward) -> Tensor:
        return score_tokens(forward, sequences, plan, self.world.device)

    def _shaped(self, scores: Tensor, rollout: Rollout, clip: bool = True) -> Tensor:
        shape = self.reward_shape
        return shape_scores(
            scores,
            finished=rollout.finished,
            clip=shape.clip if clip else None,
            missing_eos=shape.missing_eos,
            missing_eos_value=shape.missing_eos_value,
        )
