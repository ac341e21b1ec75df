"""Implements learn: several epochs of clipped policy and value updates over one experience.

An optimizer step updates actor and critic, or neither of them; see engine/lockstep.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ppo_ds.algorithm.loss.aggregation import BatchTotals, batch_totals
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import counting
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.lockstep import LockstepResult, step_or_skip
from ppo_ds.engine.trained import StepInfo, TrainedModel
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ops.histograms import RATIO_EDGES, count_bins
from ppo_ds.ops.masked import keep, sum_and_count
from ppo_ds.ppo.health import NonFiniteStep, ParityMonitor, first_nonfinite
from ppo_ds.ppo.kept_forwards import KeptForwards, KeptOutputs
from ppo_ds.ppo.losses import Parts, PtxObjective, Term, ValueObjective, actor_loss, forward_options
from ppo_ds.ppo.minibatches import Transform, minibatches, scatter_tokens
from ppo_ds.run.metrics import MetricSums, step_metrics
from ppo_ds.run.microbatches import microbatch_rows, microbatches, padding
from ppo_ds.run.stage import StepContext
from ppo_ds.types import Experience, Histogram, Metrics

ROLES = {"actor": "policy", "critic": "value"}  # model -> prefix of its metrics
# metrics that are logged as NaN if a rollout is skipped; other metrics of the update are then absent
UNKNOWN = ("policy/loss", "value/loss", "value/explained_var")
# mean and maximum of the gap between the log-probs of generation and training
GAP, MAX_GAP = "parity/logp_abs_diff_mean", "parity/logp_abs_diff_max"


@dataclass(frozen=True)
class Schedule:
    """The optimizer steps of one update."""

    epochs: int
    minibatch_size: int  # rows of one optimizer step, over all ranks
    target_kl: float | None  # nats per token; no further optimizer step once approx_kl exceeds it

    def steps(self, rows: int) -> int:
        """Returns the number of optimizer steps of an update on ``rows`` rows."""
        return self.epochs * (rows // self.minibatch_size)

    def rows_of_steps(self, rows: int, shuffle: torch.Generator) -> Iterator[Tensor]:
        """Yields row indices of each optimizer step, epoch by epoch; reports progress to the heartbeat."""
        with counting(self.steps(rows), "optimizer steps") as done:
            epochs = (minibatches(rows, self.minibatch_size, shuffle) for _ in range(self.epochs))
            for number, indices in enumerate(chain.from_iterable(epochs), start=1):
                yield indices
                done(number)


class RatioCounts:
    """Counts the ratios pi(a|s) / pi_old(a|s) of the trained tokens, one per token at every action level."""

    def __init__(self, world: World) -> None:
        self.world, self.counts = world, None  # counts in the bins of RATIO_EDGES on this rank, [N] long

    def add(self, micro: Experience, logprobs: Tensor) -> None:
        """Counts the ratios of a micro-batch; ``logprobs`` [b,R'] are those of the current policy."""
        old_logprobs = logprobs if micro.old_logprobs is None else micro.old_logprobs.to(logprobs.device)
        edges = torch.tensor(RATIO_EDGES, device=logprobs.device)
        ratios = (logprobs - old_logprobs).exp()
        counts = count_bins(ratios, edges, micro.response_mask.to(logprobs.device))
        self.counts = counts if self.counts is None else self.counts + counts

    def take(self) -> Histogram | None:
        """Returns a histogram of the ratios since the last call, or None. All ranks must call this."""
        counts, self.counts = self.counts, None
        return None if counts is None else Histogram(self.world.sum_of_shares(counts).tolist(), RATIO_EDGES)


@dataclass(frozen=True)
class ActorBackward:
    """Results of the actor's backward passes in one optimizer step on this rank, besides the gradients."""

    loss: Tensor  # 0-dim: the sum over the micro-batches
    kl_sums: Tensor  # [2]: approx_kl as (sum, count)
    gaps: list[Parts]  # GAP and MAX_GAP of each micro-batch; {} if the gap is not measured
    ratio_max: Tensor  # 0-dim
    logprobs: list[Tensor]  # one tensor [b,R'] for each micro-batch


@dataclass(kw_only=True)
class Learner:
    """Trains the actor and the critic on one experience."""

    # models
    actor: HybridActor
    critic: TrainedModel | None  # None: critic-free, or the actor has the value head
    average: Callable[[], None] | None  # updates the averaged weights after an optimizer step of the actor
    # the algorithm
    transforms: tuple[Transform, ...]  # of the rows of each optimizer step
    terms: tuple[Term, ...]  # of the actor's loss
    value: ValueObjective
    ptx: PtxObjective | None
    norm: int  # for the aggregation token_sum_norm: its divisor for each response
    schedule: Schedule
    # batches
    token_budget: int  # of a micro-batch
    packed: bool  # the models take rows without padding
    kept: KeptForwards | None = None  # forwards of make_experience that the update uses
    # the run
    context: StepContext
    parity: ParityMonitor  # checks the first forward of an update, if the actor has not run before
    ratios: RatioCounts | None = None

    @property
    def world(self) -> World:
        return self.context.world

    def __call__(
        self, experience: Experience, kl_coef: float, seed: int, critic_only: bool = False
    ) -> tuple[Experience, Metrics]:
        """Trains the models; returns ``experience``, with log-probs if the update computed them, and metrics.

        All ranks must call this, with the same ``seed``. Without old log-probs, the update must have a single
        optimizer step, whose forward computes them. May raise StepRefused before any weight has changed.
        """
        shuffle, schedule = torch.Generator().manual_seed(seed), self.schedule
        kept = KeptOutputs(None, {}) if self.kept is None else self.kept.take()
        assert not (critic_only and "actor" in kept.by_model), "the actor's graph would not be used"
        if (found := first_nonfinite(experience)) is not None:
            kept.by_model.clear()  # frees the graphs
            return experience, self.skip_rollout(experience, *found, shuffle, kl_coef, critic_only)
        fault("update")
        first_forward = experience.old_logprobs is None and not critic_only
        assert not first_forward or schedule.steps(len(experience)) == 1, "a second step needs old log-probs"
        draws = torch.Generator().manual_seed(seed)  # selected tokens do not change the order of the rows
        metrics, approx_kl, steps_done = MetricSums(), 0.0, 0
        steps: dict[str, list[StepInfo]] = {"policy": [], "value": []}

        for rows in schedule.rows_of_steps(len(experience), shuffle):
            # ends all epochs, because approx_kl changes only in an optimizer step
            if schedule.target_kl is not None and approx_kl > schedule.target_kl:
                break
            minibatch = experience.select(rows)
            for transform in self.transforms:
                minibatch = transform(minibatch, draws)
            if kept.rows is None:
                plan = microbatch_rows(minibatch, self.token_budget, self.world, self.packed)
            else:  # the minibatch holds all rows
                plan = [rows.argsort()[kept.rows]]
            micros = [minibatch.select(part).trimmed() for part in plan]
            metrics.add_parts({"perf/pad_frac_update": padding(micros, self.packed)})

            losses, actor = self.backward(minibatch, micros, kl_coef, critic_only, metrics, kept.by_model)
            done = self.step_or_skip(losses, actor, first=steps_done == 0)
            if actor is not None and steps_done == 0:
                metrics.add_max("parity/ratio_first_minibatch_max", actor.ratio_max)
                for gap in actor.gaps if self.parity.old_from_rollout else []:  # else describe() measures it
                    metrics.add_parts(gap)
            if first_forward and actor is not None:  # this is the only optimizer step of the update
                parts = scatter_tokens(actor.logprobs, experience, [rows[part] for part in plan])
                logprobs = self.world.sum_of_shares(parts)
                experience = replace(experience, logprobs=logprobs, old_logprobs=logprobs)
            if schedule.target_kl is not None and actor is not None:
                approx_kl = done.sums[0] / max(done.sums[1], 1.0)
            steps_done += 1
            for name, info in done.infos.items():
                steps[ROLES[name]].append(info)
            skipped = NonFiniteStep(done.nonfinite, minibatch, rows, None, None, kl_coef, critic_only)
            self.record(done, skipped)
            if self.context.report is not None:
                self.context.report(steps_done, self.with_logprobs(minibatch, actor, plan), losses)

        passes = {
            "policy/epochs_run": steps_done / (len(experience) // schedule.minibatch_size),
            "policy/early_stopped": float(steps_done < schedule.steps(len(experience))),
        }
        return experience, metrics.reduced(self.world) | step_metrics(steps) | passes

    def with_logprobs(self, rows: Experience, actor: ActorBackward | None, plan: list[Tensor]) -> Experience:
        """Returns ``rows`` with the log-probs in ``actor`` (None: without any). All ranks must call this."""
        logprobs = actor and self.world.sum_of_shares(scatter_tokens(actor.logprobs, rows, plan))
        return replace(rows, logprobs=logprobs)

    def record(self, done: LockstepResult, step: NonFiniteStep) -> None:
        """Counts an optimizer step as done or skipped; if done, updates the averaged weights."""
        if done.nonfinite:
            self.context.health.record_skip(step, counted=not done.overflow_expected)
            return
        self.context.health.record_step()
        if self.average is not None and not step.critic_only:
            with self.context.timer("update_actor"):
                self.average()

    def models(self, critic_only: bool = False) -> dict[str, TrainedModel]:
        """Returns the models to train, by name."""
        models = {"actor": None if critic_only else self.actor, "critic": self.critic}
        return {name: model for name, model in models.items() if model is not None}

    def backward(
        self,
        minibatch: Experience,
        micros: list[Experience],
        kl_coef: float,
        critic_only: bool,
        metrics: MetricSums,
        kept: dict[str, Any],
    ) -> tuple[dict[str, Tensor], ActorBackward | None]:
        """Accumulates the gradients of one optimizer step; returns losses by model, and the actor's results.

        Uses the model outputs in ``kept`` and removes them, so that the backward pass frees their graphs.
        """
        totals, value_totals = self.totals(minibatch)
        losses: dict[str, Tensor] = {}
        actor = None
        # the backward of a kept graph frees it before another model builds a graph
        critic_first = "critic" in kept and "actor" not in kept
        for name in ("critic", "actor") if critic_first else ("actor", "critic"):
            if name == "actor" and not critic_only:
                with self.context.timer("update_actor"):
                    actor = self.backward_actor(
                        micros, totals, value_totals, kl_coef, metrics, kept.pop(name, None)
                    )
                losses[name] = actor.loss
            if name == "critic" and self.critic is not None:
                with self.context.timer("update_critic"):
                    values = kept.pop(name, None)
                    losses[name] = self.backward_critic(self.critic, micros, value_totals, metrics, values)
        return losses, actor

    def step_or_skip(
        self, losses: dict[str, Tensor], actor: ActorBackward | None, first: bool
    ) -> LockstepResult:
        """Steps all models or none. All ranks must call this.

        At the ``first`` step of an update, raises StepRefused if the parity gap is measured and too large. If
        target_kl is set, ``sums`` of the result begins with the sum and the count of approx_kl.
        """
        extra, measures_gap = [], False

        def check_parity(sums: list[float]) -> None:
            self.parity.stop_if_exceeded(sums[-2] / max(sums[-1], 1.0))

        if actor is not None:
            measures_gap = first and GAP in actor.gaps[0]
            if self.schedule.target_kl is not None:
                extra.append(actor.kl_sums)
            if measures_gap:
                extra.append(torch.stack([gap[GAP] for gap in actor.gaps]).sum(0))
        return step_or_skip(
            self.models(critic_only=actor is None),
            losses,
            torch.cat(extra) if extra else None,
            world=self.world,
            timer=self.context.timer,
            check=check_parity if measures_gap else None,
        )

    def totals(self, minibatch: Experience) -> tuple[BatchTotals, BatchTotals]:
        """Counts an optimizer step's actions and its states that have a value loss, without communication."""
        norm, size = self.norm * len(minibatch), self.world.data_size
        totals = batch_totals([minibatch.response_mask], dp_size=size, norm=norm)
        for term in self.terms:
            totals = term.counted(minibatch, totals)
        if minibatch.value_mask is None:  # the second result is unused
            return totals, totals
        return totals, batch_totals([minibatch.value_mask], dp_size=size, norm=norm)

    def backward_actor(
        self,
        micros: list[Experience],
        totals: BatchTotals,
        value_totals: BatchTotals,
        kl_coef: float,
        metrics: MetricSums,
        out: PolicyOutput | None,
    ) -> ActorBackward:
        """Accumulates the actor's gradients over the micro-batches of one optimizer step."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        kl_sums, gaps, ratios, logprobs = loss_sum.new_zeros(2), [], [], []
        # The PTX losses come first, because ZeRO reduces gradients in the last backward. That backward must
        # reach every weight, including a value head, which only PPO's own losses do.
        for loss, parts in self.ptx_losses():
            self.actor.backward(loss, last=False)
            loss_sum += loss.detach()
            metrics.add_parts(parts)
        with counting(len(micros), "micro-batches") as done:
            for micro in micros:
                loss, parts, logprobs_now = self.policy_loss(micro, totals, value_totals, kl_coef, out)
                self.actor.backward(loss, last=micro is micros[-1])
                loss_sum += loss.detach()
                kl_sums += parts["policy/approx_kl"]
                gaps.append({name: parts.pop(name) for name in (GAP, MAX_GAP) if name in parts})
                metrics.add_parts(parts)
                ratios.append(parts["policy/ratio_max"])
                if self.ratios is not None:
                    self.ratios.add(micro, logprobs_now)
                logprobs.append(logprobs_now)
                done(len(ratios))
        return ActorBackward(loss_sum, kl_sums, gaps, torch.stack(ratios).max(), logprobs)

    def backward_critic(
        self,
        critic: TrainedModel,
        micros: list[Experience],
        totals: BatchTotals,
        metrics: MetricSums,
        values: Tensor | None,
    ) -> Tensor:
        """Accumulates the critic's gradients of one optimizer step and returns its loss."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        with counting(len(micros), "micro-batches") as done:
            for number, micro in enumerate(micros, start=1):
                loss, parts = self.value_loss(micro, critic=critic, totals=totals, values=values)
                critic.backward(loss, last=micro is micros[-1])
                loss_sum += loss.detach()
                metrics.add_parts(parts)
                done(number)
        return loss_sum

    def policy_loss(
        self,
        micro: Experience,
        totals: BatchTotals,
        value_totals: BatchTotals,
        kl_coef: float,
        out: PolicyOutput | None = None,
    ) -> tuple[Tensor, Parts, Tensor]:
        """Computes a micro-batch's part of the actor's loss, its metrics and its detached log-probs [b,R'].

        With a shared trunk, the loss includes the value loss. ``out`` is a kept output of the actor, if any.
        """
        if out is None:
            out = self.actor(
                micro.ids,
                micro.attention_mask,
                micro.response_width,
                **forward_options(self.terms),
                **self.world.sequence_argument,
            )
        micro = micro.to(self.world.device)  # after the forward, since the model arranges its rows on the CPU
        loss, parts = actor_loss(self.terms, out, micro, totals, kl_coef)
        if micro.old_logprobs is None or self.parity.old_from_rollout:
            gap = keep(micro.decode_logprobs - out.logprobs.detach(), micro.response_mask).double().abs()
            parts |= {GAP: sum_and_count(gap, micro.response_mask), MAX_GAP: gap.max()}
        if out.values is not None:
            value, value_parts = self.value(out.values, micro, value_totals)
            loss, parts = loss + value, parts | value_parts
        return loss, parts, out.logprobs.detach()

    def value_loss(
        self, micro: Experience, *, critic: TrainedModel, totals: BatchTotals, values: Tensor | None = None
    ) -> tuple[Tensor, Parts]:
        """Computes a micro-batch's part of the critic's loss, and its metrics."""
        if values is None:
            values = critic(
                micro.ids, micro.attention_mask, micro.response_width, **self.world.sequence_argument
            )
        return self.value(values, micro.to(self.world.device), totals)

    def ptx_losses(self) -> Iterator[tuple[Tensor, Parts]]:
        """Yields loss and metrics of each PTX micro-batch of one optimizer step; nothing without algo.ptx."""
        if self.ptx is None:
            return
        texts = next(self.ptx.texts)
        totals = batch_totals([texts.response_mask], dp_size=self.world.data_size)
        for micro in microbatches(texts, self.token_budget, self.world, self.packed):
            out = self.actor(
                micro.ids,
                micro.attention_mask,
                micro.response_width,
                temperature=1.0,
                label_mask=micro.response_mask,
                **self.world.sequence_argument,
            )
            yield self.ptx(out, micro.to(self.world.device), totals)

    def skip_rollout(
        self,
        experience: Experience,
        what: str,
        row: int,
        shuffle: torch.Generator,
        kl_coef: float,
        critic_only: bool,
    ) -> Metrics:
        """Skips all optimizer steps of a rollout, because ``row`` has the non-finite number ``what``.

        No row is used, because returns and whitening spread the number to other tokens and rows.
        """
        steps: dict[str, list[StepInfo]] = {"policy": [], "value": []}
        for name, model in self.models(critic_only).items():
            steps[ROLES[name]] = [model.skipped_step()] * self.schedule.steps(len(experience))
        first_epoch = minibatches(len(experience), self.schedule.minibatch_size, shuffle)
        rows = next(rows for rows in first_epoch if row in rows)
        rank = row * self.world.size // len(experience)  # all_gather_rows keeps the order of the ranks
        skipped = NonFiniteStep((what,), experience.select(rows), rows, row, rank, kl_coef, critic_only)
        self.context.health.record_skip(skipped)
        unknown = {name: math.nan for name in UNKNOWN if steps[name.partition("/")[0]]}
        return unknown | step_metrics(steps) | {"policy/epochs_run": 0.0, "policy/early_stopped": 0.0}
