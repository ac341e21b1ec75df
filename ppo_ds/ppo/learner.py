"""learn: several passes of clipped policy and value updates over one experience.

Actor and critic step together or not at all: the backward of both comes first, then all ranks agree on whether every loss and gradient is finite.
The actor's gradients wait in memory while the critic's are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import StepInfo, TrainedModel
from ppo_ds.ops.batching import padded_tokens
from ppo_ds.ops.losses import BatchTotals, batch_totals
from ppo_ds.ppo.advantages import Whitening
from ppo_ds.ppo.batching import microbatch_rows, microbatches, minibatches
from ppo_ds.ppo.losses import Parts, PolicyObjective, PtxObjective, ValueObjective
from ppo_ds.ppo.scoring import spread
from ppo_ds.training.health import Health, NonFiniteStep, first_nonfinite
from ppo_ds.training.metrics import MetricSums
from ppo_ds.training.timing import PhaseTimer
from ppo_ds.types import Experience, Metrics, Sequences

Loss = Callable[[], tuple[Tensor, Parts]]
ROLES = {"actor": "policy", "critic": "value"}  # what the metrics of each model begin with
UNKNOWN = (
    "policy/loss",
    "value/loss",
    "value/explained_var",
)  # of a rollout that nothing was learned from; what else is missing nobody reads


@dataclass(frozen=True)
class Update:
    """What one optimizer step learns from."""

    rows: Experience  # of all ranks
    places: Tensor  # [b] long: where they stand in the experience
    micros: list[Experience]  # this rank's share, one forward each
    kl_coef: float
    critic_only: bool

    def trouble(self, what: list[str], row: int | None = None, rank: int | None = None) -> NonFiniteStep:
        return NonFiniteStep(tuple(what), self.rows, self.places, row, rank, self.kl_coef, self.critic_only)


@dataclass(frozen=True)
class Pending:
    """A model whose gradients are made and whose step is due."""

    name: str  # actor | critic
    model: TrainedModel
    loss: Tensor  # 0-dim: the sum over this rank's micro-batches
    parts: list[Parts]  # of the same


class Average(Protocol):
    """A running average of the actor's weights, such as engine.shadow.ShadowWeights."""

    def ema_update(self, decay: float) -> None: ...


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
    health: Health
    seen: MetricSums = field(init=False)
    steps: dict[str, list[StepInfo]] = field(init=False)
    read: list[Tensor] = field(
        init=False
    )  # log-probs [b,R'] of each micro-batch, where the update is the first to ask for them

    def __call__(
        self, experience: Experience, kl_coef: float, seed: int, critic_only: bool = False
    ) -> tuple[Experience, Metrics]:
        """``epochs`` passes over all rows; ``seed`` orders them, alike on every rank. A collective.

        The experience comes back with the log-probs that the update has read, where it was made without.
        """
        self.seen, self.steps, self.read = MetricSums(), {"policy": [], "value": []}, []
        done, moved = 0, 0.0
        order = minibatches(
            len(experience), self.epochs, self.minibatch_size, torch.Generator().manual_seed(seed)
        )
        if (found := first_nonfinite(experience)) is not None:
            return experience, self._left_out(experience, *found, order, kl_coef, critic_only)
        for rows in order:
            if self.target_kl is not None and moved > self.target_kl:
                break
            minibatch = experience.select(rows)
            advantages = self.whitening.in_minibatch(minibatch.advantages, minibatch.response_mask)
            minibatch = replace(minibatch, advantages=advantages)
            plan = microbatch_rows(minibatch, self.token_budget, self.world, self.packed)
            micros = [minibatch.select(part).trimmed() for part in plan]
            self._note_padding(micros)
            moved = self._update(Update(minibatch, rows, micros, kl_coef, critic_only))
            done += 1
        passes = {
            "policy/epochs_run": done * self.epochs / len(order),
            "policy/early_stopped": float(done < len(order)),
        }
        if self.read:
            assert len(order) == 1, (
                "the log-probs of a second optimizer step are no longer those of the old policy"
            )
            experience = self._completed(experience, [rows[part] for part in plan])
        return experience, self.seen.reduced(self.world) | describe_steps(self.steps) | passes

    def _left_out(
        self,
        experience: Experience,
        what: str,
        row: int,
        order: list[Tensor],
        kl_coef: float,
        critic_only: bool,
    ) -> Metrics:
        """No optimizer step learns from a rollout of which anything is not finite: whitening and returns carry it to other rows."""
        for name, (model, _) in self.losses(Update(experience, order[0], [], kl_coef, critic_only)).items():
            self.steps[ROLES[name]] += [model.nothing()] * len(order)
        rows = next(rows for rows in order if row in rows)
        rank = row * self.world.size // len(experience)  # exchange.py lays them out in the order of the ranks
        self.health.skip(
            Update(experience.select(rows), rows, [], kl_coef, critic_only).trouble([what], row, rank)
        )
        unknown = {name: math.nan for name in UNKNOWN if self.steps[name.partition("/")[0]]}
        return unknown | describe_steps(self.steps) | {"policy/epochs_run": 0.0, "policy/early_stopped": 0.0}

    def _note_padding(self, micros: list[Experience]) -> None:
        for micro in micros:
            lengths = micro.attention_mask.sum(1)
            spent = padded_tokens(lengths, self.packed)
            self.seen.add_parts({"perf/pad_frac_update": torch.tensor([spent - int(lengths.sum()), spent])})

    def _completed(self, experience: Experience, plan: list[Tensor]) -> Experience:
        """With the log-probs that the one update read, those of all ranks."""
        answered = experience.attention_mask[:, experience.prompt_width :]
        logprobs = self.world.sum(
            spread(self.read, plan, torch.zeros(answered.shape)).masked_fill(~answered, 0.0)
        )
        return replace(experience, logprobs=logprobs, old_logprobs=logprobs)

    def _update(self, update: Update) -> float:
        """One optimizer step; returns how far the policy was from the old one before it: approx_kl over all ranks, 0 where nobody asks."""
        first, pending = not self.steps["policy"], self._backward(update)
        if first and pending[0].name == "actor":
            for parts in pending[0].parts:
                self.seen.add_max("parity/ratio_first_minibatch_max", parts["policy/ratio_max"])
        bad, overflows, moved = self._agreed(pending)
        for each in pending:
            with self.timer(f"update_{each.name}"):
                info = each.model.skip(overflow=each.name in overflows) if bad else each.model.step()
            self.steps[ROLES[each.name]].append(info)
        if bad:
            lowered = all(each.model.finds_its_scale for each in pending if each.name in overflows)
            self.health.skip(
                update.trouble(bad), forgiven=lowered and not any(what.startswith("loss") for what in bad)
            )
        else:
            self.health.sound()
            if self.average is not None and not update.critic_only:
                with self.timer("update_actor"):
                    self.average.ema_update(self.decay)
        return moved

    def losses(self, update: Update) -> dict[str, tuple[TrainedModel, list[Loss]]]:
        """By model: what makes the loss of each micro-batch."""
        totals, value_totals = self._totals(update.rows.response_mask), self._value_totals(update.rows)
        made: dict[str, tuple[TrainedModel, list[Loss]]] = {}
        if not update.critic_only:
            policy = [
                partial(self._policy_loss, micro, totals, value_totals, update.kl_coef)
                for micro in update.micros
            ]
            made["actor"] = self.actor, policy
        if self.critic is not None:
            made["critic"] = (
                self.critic,
                [partial(self._value_loss, micro, value_totals) for micro in update.micros],
            )
        return made

    def _backward(self, update: Update) -> list[Pending]:
        """The gradients of every model that learns."""
        pending = []
        for name, (model, losses) in self.losses(update).items():
            with self.timer(f"update_{name}"):
                # PPO's own come last: ZeRO reduces in the last backward, which must reach every weight, a value head too
                found, loss = self._accumulate(
                    model, (self._ptx_losses() if name == "actor" else []) + losses
                )
            pending.append(Pending(name, model, loss, found[-len(losses) :]))
        return pending

    def _accumulate(self, model: TrainedModel, losses: list[Loss]) -> tuple[list[Parts], Tensor]:
        """The backward of each loss, one graph at a time; what they say of themselves, and their sum."""
        found, total = [], torch.zeros((), dtype=torch.float64, device=self.world.device)
        for i, make in enumerate(losses, start=1):
            loss, parts = make()
            model.backward(loss, last=i == len(losses))
            self.seen.add_parts(parts)
            found.append(parts)
            total += loss.detach()
        return found, total

    def _agreed(self, pending: list[Pending]) -> tuple[list[str], list[str], float]:
        """What is not finite on any rank, whose gradients among it, and how far the policy has moved. One collective, and one wait for the device."""
        mine = [number for each in pending for number in (each.loss, each.model.squared_gradient())]
        if asked := self.target_kl is not None and pending[0].name == "actor":
            mine += list(sum(parts["policy/approx_kl"] for parts in pending[0].parts))
        numbers = self.world.sum(torch.stack([number.double().to(self.world.device) for number in mine]))
        sound = numbers.float().isfinite().tolist()  # DeepSpeed takes the norm in fp32
        losses, gradients = [
            [each.name for each, good in zip(pending, sound[i::2], strict=False) if not good] for i in (0, 1)
        ]
        bad = [f"loss of the {name}" for name in losses] + [f"gradient of the {name}" for name in gradients]
        moved, count = numbers[-2:].tolist() if asked else (0.0, 1.0)
        return bad, gradients, moved / max(count, 1.0)

    # of the whole optimizer step: every rank holds all its rows, so no one needs to be asked

    def _totals(self, mask: Tensor) -> BatchTotals:
        return batch_totals([mask], dp_size=self.world.size, norm=self.norm * len(mask))

    def _value_totals(self, minibatch: Experience) -> BatchTotals | None:
        return self._totals(minibatch.value_mask) if minibatch.value_mask is not None else None

    # -- the loss of one micro-batch ----------------------------------------------------------------------------------------------------------

    def _policy_loss(
        self, micro: Experience, totals: BatchTotals, value_totals: BatchTotals | None, kl_coef: float
    ) -> tuple[Tensor, Parts]:
        out = self.actor(
            micro.ids,
            micro.attention_mask,
            micro.response_width,
            with_entropy=self.policy.entropy_kind == "exact",
            with_aux=self.policy.aux_coef > 0,
            entropy_gradient=self.policy.entropy_coef > 0,
        )
        micro = micro.to(self.world.device)  # the model lays its rows out on the CPU
        if micro.old_logprobs is None:
            self.read.append(out.logprobs.detach())
        loss, parts = self.policy(out, micro, totals, kl_coef)
        if out.values is None:
            return spoiled(loss, "actor"), parts
        value, value_parts = self.value(
            out.values, micro, value_totals
        )  # a shared trunk: one forward, one backward
        return spoiled(loss + value, "actor"), parts | value_parts

    def _value_loss(self, micro: Experience, totals: BatchTotals) -> tuple[Tensor, Parts]:
        values = self.critic(micro.ids, micro.attention_mask, micro.response_width)
        loss, parts = self.value(values, micro.to(self.world.device), totals)
        return spoiled(loss, "critic"), parts

    def _ptx_losses(self) -> list[Loss]:
        if self.ptx is None:
            return []
        texts = next(self.ptx_texts)
        totals = batch_totals([texts.response_mask], dp_size=self.world.size)
        return [
            partial(self._ptx_loss, micro, totals)
            for micro in microbatches(texts, self.token_budget, self.world, self.packed)
        ]

    def _ptx_loss(self, micro: Sequences, totals: BatchTotals) -> tuple[Tensor, Parts]:
        out = self.actor(micro.ids, micro.attention_mask, micro.response_width, temperature=1.0)
        return self.ptx(out, micro.to(self.world.device), totals)


def spoiled(loss: Tensor, role: str) -> Tensor:
    """The loss as it is, but for faults on purpose: NaN, or the same with gradients of NaN."""
    if fault(f"grad.{role}"):
        loss.register_hook(lambda gradient: gradient * math.nan)
    return loss * math.nan if fault(f"loss.{role}") else loss


def describe_steps(steps: dict[str, list[StepInfo]]) -> Metrics:
    """Gradient norms (before clipping, mean over the optimizer steps: NaN if any is) and learning rates (of the last); alike on every rank."""
    numbers: Metrics = {}
    for role, infos in steps.items():
        if infos:
            numbers[f"{role}/grad_norm"] = sum(info.grad_norm for info in infos) / len(infos)
            numbers[f"{role}/lr"] = infos[-1].lr
    taken = [info for infos in steps.values() for info in infos]
    numbers["health/skipped_steps"] = float(
        max(sum(info.skipped for info in infos) for infos in steps.values())
    )  # they skip together
    numbers["health/loss_scale"] = (steps["policy"] or taken)[-1].loss_scale
    return numbers
