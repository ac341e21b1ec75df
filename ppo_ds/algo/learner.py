"""learn: several passes of clipped policy and value updates over one experience."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ppo_ds.algo.advantages import Whitening
from ppo_ds.algo.exchange import microbatch_rows, microbatches, minibatches
from ppo_ds.algo.metrics import MetricSums
from ppo_ds.algo.objectives import Parts, PolicyObjective, PtxObjective, ValueObjective
from ppo_ds.algo.scoring import spread
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.engine.trained import StepInfo, TrainedModel
from ppo_ds.engine.world import World
from ppo_ds.ops.batching import places
from ppo_ds.ops.losses import BatchTotals, batch_totals
from ppo_ds.types import ActorExperience, CriticExperience, Experience, Metrics, Sequences, experience_of


class Average(Protocol):
    """A running average of the actor's weights, such as engine.shadow.ShadowWeights."""

    def follow(self, decay: float) -> None: ...


@dataclass(kw_only=True)
class Learner:
    actor: TrainedModel
    critic: TrainedModel | None  # None: there is none, or the actor has the value head
    world: World
    epochs: int
    minibatch_size: int
    token_budget: int
    packed: bool  # the models take rows without padding
    norm: int  # tokens that one answer counts as, for the aggregation token_sum_norm
    target_kl: float | None  # nats per token; beyond it the passes end
    whitening: Whitening
    policy: PolicyObjective
    value: ValueObjective
    ptx: PtxObjective | None
    ptx_texts: Iterator[Sequences] | None  # the texts of each optimizer step, those of all ranks
    average: Average | None
    decay: float  # of the average
    timer: PhaseTimer
    seen: MetricSums = field(init=False)
    steps: dict[str, list[StepInfo]] = field(init=False)
    read: list[Tensor] = field(init=False)  # log-probs [b,R'] of each micro-batch, where the update is the first to ask for them

    def __call__(self, experience: Experience, kl_coef: float, seed: int, critic_only: bool = False) -> tuple[Experience, Metrics]:
        """``epochs`` passes over all rows; ``seed`` orders them, alike on every rank. A collective.

        The experience comes back with the log-probs that the update has read, where it was made without.
        """
        self.seen, self.steps, self.read = MetricSums(), {"policy": [], "value": []}, []
        done, moved = 0, 0.0
        order = minibatches(len(experience), self.epochs, self.minibatch_size, torch.Generator().manual_seed(seed))
        for rows in order:
            if self.target_kl is not None and moved > self.target_kl:
                break
            minibatch = experience.select(rows)
            advantages = self.whitening.in_minibatch(minibatch.advantages, minibatch.response_mask)
            minibatch = replace(minibatch, advantages=advantages)
            plan = microbatch_rows(minibatch, self.token_budget, self.world, self.packed)
            micros = [minibatch.select(part).trimmed() for part in plan]
            self._note_padding(micros)
            if not critic_only:
                moved = self._update_actor(minibatch, micros, kl_coef)
            if self.critic is not None:
                self._update_critic(minibatch, micros)
            done += 1
        passes = {"policy/epochs_run": done * self.epochs / len(order), "policy/early_stopped": float(done < len(order))}
        if self.read:
            assert len(order) == 1, "the log-probs of a second optimizer step are no longer those of the old policy"
            experience = self._completed(experience, [rows[part] for part in plan])
        return experience, self.seen.reduced(self.world) | describe_steps(self.steps) | passes

    def _note_padding(self, micros: list[Experience]) -> None:
        for micro in micros:
            lengths = micro.attention_mask.sum(1)
            spent = places(lengths, self.packed)
            self.seen.add_parts({"perf/pad_frac_update": torch.tensor([spent - int(lengths.sum()), spent])})

    def _completed(self, experience: Experience, plan: list[Tensor]) -> Experience:
        """With the log-probs that the one update read, those of all ranks."""
        answered = experience.attention_mask[:, experience.prompt_width :]
        logprobs = self.world.sum(spread(self.read, plan, torch.zeros(answered.shape)).masked_fill(~answered, 0.0))
        columns = {f.name: getattr(experience, f.name) for f in fields(experience)}
        return experience_of(**columns, logprobs=logprobs, old_logprobs=logprobs)

    def _update_actor(self, minibatch: Experience, micros: list[Experience], kl_coef: float) -> float:
        """One optimizer step; returns how far the policy was from the old one before it: approx_kl over all ranks, 0 where nobody asks."""
        first = not self.steps["policy"]
        totals, value_totals = self._totals(minibatch.response_mask), self._value_totals(minibatch)
        losses = [partial(self._policy_loss, micro, totals, value_totals, kl_coef) for micro in micros]
        with self.timer("update_actor"):
            # PPO's own come last: ZeRO reduces in the last backward, which must reach every weight, a value head too
            found = self._accumulate(self.actor, self._ptx_losses() + losses)
            self.steps["policy"].append(self.actor.step())
            if self.average is not None:
                self.average.follow(self.decay)
        if first:
            for parts in found[-len(micros) :]:
                self.seen.add_max("parity/ratio_first_minibatch_max", parts["policy/ratio_max"])
        if self.target_kl is None:
            return 0.0
        moved, count = self.world.sum(sum(parts["policy/approx_kl"] for parts in found[-len(micros) :])).tolist()
        return moved / max(count, 1.0)

    def _update_critic(self, minibatch: CriticExperience, micros: list[CriticExperience]) -> None:
        totals = self._value_totals(minibatch)
        with self.timer("update_critic"):
            self._accumulate(self.critic, [partial(self._value_loss, micro, totals) for micro in micros])
            self.steps["value"].append(self.critic.step())

    def _accumulate(self, model: TrainedModel, losses: list[Callable[[], tuple[Tensor, Parts]]]) -> list[Parts]:
        """The backward of each loss, one graph at a time."""
        found = []
        for i, make in enumerate(losses, start=1):
            loss, parts = make()
            model.backward(loss, last=i == len(losses))
            self.seen.add_parts(parts)
            found.append(parts)
        return found

    # of the whole optimizer step: every rank holds all its rows, so no one needs to be asked

    def _totals(self, mask: Tensor) -> BatchTotals:
        return batch_totals([mask], dp_size=self.world.size, norm=self.norm * len(mask))

    def _value_totals(self, minibatch: Experience) -> BatchTotals | None:
        return self._totals(minibatch.value_mask) if isinstance(minibatch, CriticExperience) else None

    # -- the loss of one micro-batch ----------------------------------------------------------------------------------------------------------

    def _policy_loss(self, micro: Experience, totals: BatchTotals, value_totals: BatchTotals | None, kl_coef: float) -> tuple[Tensor, Parts]:
        out = self.actor(
            micro.ids,
            micro.attention_mask,
            micro.response_width,
            with_entropy=self.policy.entropy_kind == "exact",
            with_aux=self.policy.aux_coef > 0,
            entropy_gradient=self.policy.entropy_coef > 0,
        )
        micro = micro.to(self.world.device)  # the model lays its rows out on the CPU
        if not isinstance(micro, ActorExperience):
            self.read.append(out.logprobs.detach())
        loss, parts = self.policy(out, micro, totals, kl_coef)
        if out.values is None:
            return loss, parts
        value, value_parts = self.value(out.values, micro, value_totals)  # a shared trunk: one forward, one backward
        return loss + value, parts | value_parts

    def _value_loss(self, micro: CriticExperience, totals: BatchTotals) -> tuple[Tensor, Parts]:
        values = self.critic(micro.ids, micro.attention_mask, micro.response_width)
        return self.value(values, micro.to(self.world.device), totals)

    def _ptx_losses(self) -> list[Callable[[], tuple[Tensor, Parts]]]:
        if self.ptx is None:
            return []
        texts = next(self.ptx_texts)
        totals = batch_totals([texts.response_mask], dp_size=self.world.size)
        return [partial(self._ptx_loss, micro, totals) for micro in microbatches(texts, self.token_budget, self.world, self.packed)]

    def _ptx_loss(self, micro: Sequences, totals: BatchTotals) -> tuple[Tensor, Parts]:
        out = self.actor(micro.ids, micro.attention_mask, micro.response_width, temperature=1.0)
        return self.ptx(out, micro.to(self.world.device), totals)


def describe_steps(steps: dict[str, list[StepInfo]]) -> Metrics:
    """Gradient norms (before clipping, mean over the optimizer steps) and learning rates (of the last); alike on every rank."""
    numbers: Metrics = {}
    for role, infos in steps.items():
        if infos:
            numbers[f"{role}/grad_norm"] = sum(info.grad_norm for info in infos) / len(infos)
            numbers[f"{role}/lr"] = infos[-1].lr
    taken = [info for infos in steps.values() for info in infos]
    numbers["health/skipped_steps"] = float(sum(info.skipped for info in taken))
    numbers["health/loss_scale"] = (steps["policy"] or taken)[-1].loss_scale
    return numbers
