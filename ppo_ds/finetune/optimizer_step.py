"""Common code of sft and reward_model, the stages that train one model: a base class, an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ppo_ds.data.demonstrations import DemonstrationSource
from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.data.preferences import PreferenceSource
from ppo_ds.data.stream import Stream
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import counting
from ppo_ds.engine.lockstep import step_or_skip
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.run.health import SkippedStep
from ppo_ds.run.metrics import MetricSums, step_metrics
from ppo_ds.run.performance import Capacity, UpdateCost, memory, throughput
from ppo_ds.run.stage import RunContext
from ppo_ds.types import Metrics

Micro = TypeVar("Micro")
Source = TypeVar("Source", DemonstrationSource, PreferenceSource)
Batch = TypeVar("Batch")
Parts = dict[str, Tensor]  # metrics of a micro-batch as local sums, see algorithm/loss/aggregation.py


@dataclass(frozen=True)
class SkippedBatch(SkippedStep):
    """A skipped optimizer step with its rows."""

    batch: Any  # the rows of all ranks, in the stage's type


@dataclass
class OptimizerStep:
    """Accumulates gradients over micro-batches and updates one model, on all ranks or on none."""

    context: RunContext
    name: str  # name of the model, such as actor
    prefix: str  # prefix of its metrics, such as sft
    model: TrainedModel
    ema: WeightCopy | None
    ema_decay: float
    capacity: Capacity
    cost: UpdateCost

    def __call__(
        self, batch: Any, micros: Sequence[Micro], compute_loss: Callable[[Micro], tuple[Tensor, Parts]]
    ) -> Metrics:
        """Makes one optimizer step and returns its metrics over all ranks. All ranks must call this.

        DeepSpeed averages gradients over ranks. The losses of the micro-batches of all ranks must therefore
        add up to the loss of the optimizer step times the number of ranks. The loss of a micro-batch must
        be the sum over its rows or tokens, times the number of ranks, divided by their total in the step.
        The result is the exact gradient of the global mean, for any number of ranks and micro-batches.

        Raises TooManySkips once health.max_skips steps in a row were skipped.

        Args:
            batch: The rows of the optimizer step on all ranks; kept if the step is skipped.
            micros: This rank's micro-batches, as many as on every other rank.
            compute_loss: Returns the loss of a micro-batch, as above, and its metrics.
        """
        context, sums = self.context, MetricSums()
        fault("update")
        total = torch.zeros((), dtype=torch.float64, device=context.world.device)
        with context.timer(f"update_{self.name}"), counting(len(micros), "micro-batches") as finished:
            for i, micro in enumerate(micros, start=1):
                loss, parts = compute_loss(micro)
                self.model.backward(loss, last=i == len(micros))
                total += loss.detach()
                sums.add_parts(parts)
                finished(i)
        done = step_or_skip(
            {self.name: self.model}, {self.name: total}, None, world=context.world, timer=context.timer
        )
        if done.nonfinite:
            skipped = SkippedBatch(done.nonfinite, batch)
            context.health.record_skip(skipped, counted=not done.overflow_expected)
        else:
            context.health.record_step()
            if self.ema is not None:
                with context.timer(f"update_{self.name}"):
                    self.ema.ema_update(self.ema_decay)
        return sums.reduced(context.world) | step_metrics({self.prefix: [done.infos[self.name]]})

    def performance(
        self, lengths: Sequence[int], times: Metrics, *, head_positions: int, samples: int
    ) -> Metrics:
        """Computes perf/* and mem/* of a step on rows of ``lengths`` tokens. All ranks must call this.

        Args:
            lengths: The tokens of each row of all ranks.
            times: time/* of the step.
            head_positions: The number of positions at which the head of a language model is computed.
            samples: The number of rows or pairs.
        """
        world = self.context.world
        found = throughput(sum(lengths), samples, times["time/step"], world.size)
        if seconds := times.get(f"time/update_{self.name}"):
            flops = self.cost.flops(lengths, head_positions=head_positions, passes=1)
            found[f"perf/mfu_{self.name}"] = flops / seconds / self.capacity.flops
        return found | memory(world)


@dataclass(kw_only=True)
class FinetuneStage(Generic[Source, Batch]):
    """A stage that trains one model on rows. run/stage.py documents the methods, which run/loop.py calls."""

    context: RunContext
    total_steps: int
    train_tokens: int  # maximum tokens of one micro-batch
    score_tokens: int  # maximum tokens of one forward of an evaluation
    eval_rows: int | None  # rows or pairs of an evaluation; None: all
    update: OptimizerStep
    rows: Stream[Source, Batch]
    held_out: Source | None
    tokenizer: Tokenizer

    def start(self) -> None:
        """Does nothing, since the training needs no preparation."""

    def next_rows(self) -> Batch:
        """Returns the next step's rows, or raises Abandoned if a stop was requested before the step began."""
        with self.context.timer("data"):
            rows = next(self.rows)
        self.context.stop.raise_if_stopped()
        return rows

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        return {self.update.name: self.update.model}

    @property
    def data(self) -> list[Fingerprint]:
        return [source.fingerprint for source in (self.rows.source, self.held_out) if source is not None]

    @property
    def weight_copies(self) -> Mapping[str, WeightCopy]:
        return {} if self.update.ema is None else {"ema": self.update.ema}

    @property
    def counters(self) -> Mapping[str, Callable[[], float]]:
        return {}
