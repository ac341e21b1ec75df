"""learn: several passes of clipped policy and value updates over one experience."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.algo.exchange import microbatches, minibatches
from ppo_ds.algo.metrics import MetricSums
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.engine.trained import StepInfo, TrainedModel
from ppo_ds.engine.world import World
from ppo_ds.ops.kl import approx_kl
from ppo_ds.ops.losses import BatchTotals, batch_totals, entropy_loss, kl_loss, policy_loss, value_loss
from ppo_ds.ops.masked import masked_sum
from ppo_ds.types import Experience, Metrics


@dataclass(frozen=True)
class PolicyObjective:
    """The actor's loss: clipped surrogate - entropy_coef * entropy (+ kl_coef * KL where the KL is not in the reward)."""

    clip_low: float
    clip_high: float | None
    dual_clip: float | None
    agg: str
    entropy_coef: float
    kl_in_loss: bool
    kl_estimator: str


@dataclass(frozen=True)
class ValueObjective:
    """The critic's loss: coef * (1/2 if half) * squared error, clipped around the old value."""

    clip: float | None
    half: bool
    coef: float
    agg: str


@dataclass(kw_only=True)
class Learner:
    actor: TrainedModel
    critic: TrainedModel
    world: World
    epochs: int
    minibatch_size: int
    token_budget: int
    policy: PolicyObjective
    value: ValueObjective
    timer: PhaseTimer

    def __call__(self, experience: Experience, kl_coef: float, seed: int) -> Metrics:
        """``epochs`` passes over all rows; ``seed`` orders them, alike on every rank."""
        seen = MetricSums()
        steps: dict[str, list[StepInfo]] = {"policy": [], "value": []}
        generator = torch.Generator().manual_seed(seed)
        for rows in minibatches(len(experience), self.epochs, self.minibatch_size, generator):
            minibatch = experience.select(rows)
            micros = microbatches(minibatch, self.token_budget, self.world)
            # of the whole optimizer step: every rank holds all its rows, so no one needs to be asked
            totals = batch_totals([minibatch.response_mask], dp_size=self.world.size)
            first = not steps["policy"]
            with self.timer("update_actor"):
                for i, micro in enumerate(micros, start=1):
                    loss, parts = self._policy_loss(micro.to(self.world.device), totals, kl_coef)
                    self.actor.backward(loss, last=i == len(micros))
                    seen.add_parts(parts)
                    if first:
                        seen.add_max("parity/ratio_first_minibatch_max", parts["policy/ratio_max"])
                steps["policy"].append(self.actor.step())
            with self.timer("update_critic"):
                for i, micro in enumerate(micros, start=1):
                    loss, parts = self._value_loss(micro.to(self.world.device), totals)
                    self.critic.backward(loss, last=i == len(micros))
                    seen.add_parts(parts)
                steps["value"].append(self.critic.step())
        return seen.reduced(self.world) | describe_steps(steps) | {"policy/epochs_run": float(self.epochs)}

    def _policy_loss(self, micro: Experience, totals: BatchTotals, kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        shape, mask = self.policy, micro.response_mask
        logprobs, entropy = self.actor(micro.ids, micro.attention_mask, micro.response_width, with_entropy=True)
        loss, seen = policy_loss(
            logprobs,
            micro.logprobs,
            micro.advantages,
            mask,
            clip_low=shape.clip_low,
            clip_high=shape.clip_high,
            dual_clip=shape.dual_clip,
            agg=shape.agg,
            totals=totals,
        )
        if shape.entropy_coef:
            loss = loss - shape.entropy_coef * entropy_loss(entropy, mask, agg=shape.agg, totals=totals)
        if shape.kl_in_loss:
            loss = loss + kl_coef * kl_loss(logprobs, micro.ref_logprobs, mask, estimator=shape.kl_estimator, agg=shape.agg, totals=totals)
            seen["policy/kl_loss"] = token_sum(approx_kl(logprobs, micro.ref_logprobs, shape.kl_estimator), mask)
        seen["policy/entropy"] = token_sum(entropy, mask)
        return loss, seen

    def _value_loss(self, micro: Experience, totals: BatchTotals) -> tuple[Tensor, dict[str, Tensor]]:
        shape = self.value
        values = self.critic(micro.ids, micro.attention_mask, micro.response_width)
        loss, seen = value_loss(
            values, micro.values, micro.returns, micro.response_mask, clip=shape.clip, half=shape.half, agg=shape.agg, totals=totals
        )
        return shape.coef * loss, seen


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[2]: sum over tokens, tokens; a mean once it is added up over micro-batches and ranks."""
    return torch.stack([masked_sum(x.detach(), mask), mask.sum()])


def describe_steps(steps: dict[str, list[StepInfo]]) -> Metrics:
    """Gradient norms (before clipping, mean over the optimizer steps) and learning rates (of the last); alike on every rank."""
    numbers: Metrics = {}
    for role, infos in steps.items():
        numbers[f"{role}/grad_norm"] = sum(info.grad_norm for info in infos) / len(infos)
        numbers[f"{role}/lr"] = infos[-1].lr
    numbers["health/skipped_steps"] = float(sum(info.skipped for infos in steps.values() for info in infos))
    numbers["health/loss_scale"] = steps["policy"][-1].loss_scale
    return numbers
