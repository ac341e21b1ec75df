"""Supervised fine-tuning stage: maximizes the log-likelihood of demonstrations.

One step is one optimizer step on a batch of rows:
  1. next(rows)   the rows of the step, the same on every rank
  2. update       forward and backward over this rank's micro-batches, then the optimizer step

The loss is the mean of -log p over all learned tokens of the step. It is exact for any number of ranks and
micro-batches. The LM head runs only at positions that predict learned tokens. Options:
  - Label smoothing (Szegedy et al. 2016): (1 - s) * -log p(token) + s * mean of -log p over the vocabulary.
  - NEFTune (Jain et al. 2023): noise on the embeddings, which depends only on the seed of the run, the step
    and the row (models/neftune.py).
  - The load-balancing loss of a mixture of experts, with the coefficient of the model's config.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_ds.algorithm.loss.aggregation import BatchTotals, aggregate, batch_totals, token_mean
from ppo_ds.config.sections.finetune import SFTConfig
from ppo_ds.data.demonstrations import DemonstrationSource
from ppo_ds.data.prompts import prompt_id
from ppo_ds.distributed import heartbeat
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.rng import fork_rng
from ppo_ds.finetune.optimizer_step import FinetuneStage, Parts
from ppo_ds.models.neftune import EmbeddingNoise
from ppo_ds.ops.masked import sum_and_count
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.run.export import export_actor
from ppo_ds.run.failure_dump import dump_failure
from ppo_ds.run.health import TooManySkips
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.microbatches import filled, microbatch_rows, padding
from ppo_ds.run.nan_debug import replay_rows
from ppo_ds.run.stage import Evaluation, StepResult
from ppo_ds.types import Metrics, Prompts, Rollout, Sequences, to_device

EVAL_ROWS = 1024  # number of held-out rows that are divided into forwards at a time
NOISE_SEED_OFFSET = 1_000_000_007  # seeds of the noise differ from those of other random numbers


@dataclass(kw_only=True)
class SFTTrainer(FinetuneStage[DemonstrationSource, Sequences]):
    """The SFT stage."""

    config: SFTConfig
    seed: int
    actor: HybridActor
    eval_weights: Callable[[], AbstractContextManager[None]]  # swaps in the weights to evaluate
    prompts: Prompts | None  # held-out prompts to answer at each evaluation
    generator: Generator

    def step(self, index: int) -> StepResult:
        world, packed, batch = self.context.world, self.actor.module.packed, self.next_rows()
        full, totals = filled(batch, world.size), self.totals(batch)
        plan = microbatch_rows(full, self.train_tokens, world, packed)
        with self.context.budgets.ending(self.context.budgets.train, "the update"):
            metrics = self.update(batch, plan, partial(self.loss, batch=full, totals=totals, index=index))
        padded, tokens = world.sum(padding([full.select(rows) for rows in plan], packed)).tolist()
        metrics |= {
            "perf/pad_frac_update": padded / tokens,
            "sft/tokens": totals.tokens,
            "sft/learned_frac": totals.tokens / float(batch.attention_mask.sum()),
            "sft/epoch": self.rows.epoch,
        }
        return StepResult(
            metrics=metrics,
            episodes=len(batch),
            tokens=int(totals.tokens),
            performance=partial(
                self.update.performance,
                batch.attention_mask.sum(1).tolist(),
                head_positions=int(totals.tokens),
                samples=len(batch),
            ),
        )

    def totals(self, batch: Sequences) -> BatchTotals:
        """Counts the learned tokens of one optimizer step. Every rank holds all rows."""
        return batch_totals([batch.response_mask], dp_size=self.context.world.size)

    def loss(
        self, rows: Tensor, *, batch: Sequences, totals: BatchTotals, index: int
    ) -> tuple[Tensor, Parts]:
        """Computes the share of ``rows`` [b] (indices) in the loss of step ``index``, and its metrics."""
        micro, smoothing, aux_coef = batch.select(rows).trimmed(), self.config.label_smoothing, self.aux_coef
        out = self.actor(
            micro.ids,
            micro.attention_mask,
            micro.response_width,
            label_mask=micro.response_mask,
            with_mean=smoothing > 0,
            with_aux=aux_coef > 0,
            with_correct=True,
            noise=self.noise(rows, index),
        )
        mask = to_device(micro.response_mask, self.context.world.device)
        nll = losses = -out.logprobs
        if smoothing:
            losses = (1 - smoothing) * nll - smoothing * out.mean_logprobs
        loss = aggregate(losses, mask, token_mean, totals)
        parts = {
            "sft/loss": sum_and_count(losses, mask),
            "sft/token_accuracy": sum_and_count(out.correct, mask),
        }
        if smoothing:
            parts["sft/nll"] = sum_and_count(nll, mask)
        if aux_coef:
            # ``out.aux`` is a mean over the tokens of this forward, so it is weighted by their share of the
            # learned tokens of the optimizer step
            tokens = mask.sum()
            loss = loss + aux_coef * out.aux * (tokens * (totals.dp_size / max(totals.tokens, 1.0)))
            parts["sft/aux_loss"] = torch.stack([out.aux.detach() * tokens, tokens])
        return loss, parts

    @property
    def aux_coef(self) -> float:
        """The coefficient of the load-balancing loss; 0 unless the model is a mixture of experts."""
        return self.actor.module.balance_coef or 0.0

    def noise(self, rows: Tensor, index: int) -> EmbeddingNoise | None:
        if not self.config.neftune_alpha:
            return None
        first = (self.seed + 1) * NOISE_SEED_OFFSET + index * self.config.batch_size
        return EmbeddingNoise(self.config.neftune_alpha, first + rows)

    # -- evaluation ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> Evaluation | None:
        """Measures the loss on held-out rows and answers some prompts greedily. All ranks must call this."""
        if self.held_out is None:
            return None
        with self.context.timer("eval"), self.eval_weights(), fork_rng(self.context.world):
            with self.context.budgets.ending(self.context.budgets.score, "the evaluation"):
                metrics = self.held_out_metrics(self.held_out)
            answers = [] if self.prompts is None else self.answers(self.prompts)
        return Evaluation(metrics, answers)

    def held_out_metrics(self, source: DemonstrationSource) -> Metrics:
        """Computes loss, perplexity and token accuracy over the learned tokens of the held-out rows."""
        world, packed, sums = self.context.world, self.actor.module.packed, MetricSums()
        count = min(len(source), self.eval_rows or len(source))
        for start in range(0, count, EVAL_ROWS):
            rows = source.batch(range(start, min(start + EVAL_ROWS, count)))
            rows = filled(rows, world.size)
            for part in microbatch_rows(rows, self.score_tokens, world, packed):
                micro = rows.select(part).trimmed()
                out = self.actor(
                    micro.ids,
                    micro.attention_mask,
                    micro.response_width,
                    label_mask=micro.response_mask,
                    with_correct=True,
                )
                mask = to_device(micro.response_mask, world.device)
                sums.add_mean("eval/loss", -out.logprobs, mask)
                sums.add_mean("eval/token_accuracy", out.correct, mask)
            self.context.stop.raise_if_stopped()  # called rarely, since it waits for the device
        metrics = sums.reduced(world)
        # above e^700 a float would overflow
        return metrics | {"eval/perplexity": math.exp(min(metrics["eval/loss"], 700.0))}

    def answers(self, prompts: Prompts) -> list[dict[str, Any]]:
        """Answers held-out prompts greedily and returns the answers of all ranks as sample rows."""
        world, count = self.context.world, len(prompts)
        each = -(-count // world.size)
        mine = torch.arange(world.rank * each, (world.rank + 1) * each)
        sampling = SamplingParams(
            max_new_tokens=self.config.sample_tokens,
            min_new_tokens=0,
            temperature=1.0,
            top_p=1.0,
            top_k=1,
            stop_token_ids=self.tokenizer.stop_ids,
            stop_strings=(),
        )
        before = heartbeat.enter("generating, in an evaluation")
        with self.actor.generation_mode():
            # every rank answers the same number of prompts; the last prompt is repeated as a filler
            rollout = self.generator(prompts.select(mine.clamp(max=count - 1)), sampling)
        heartbeat.enter(*before)
        self.context.stop.raise_if_stopped()
        rows = [self.answer_row(rollout, i) for i in range(int((mine < count).sum()))]
        return [row for part in world.gather_objects(rows) for row in part]

    def answer_row(self, rollout: Rollout, i: int) -> dict[str, Any]:
        """Returns an answer as a sample row with score 1 if it equals the answer in the data, else 0."""
        about = rollout.metadata[i]
        ids = rollout.response_ids[i][rollout.response_mask[i]].tolist()
        response = self.tokenizer.decode(ids)
        return {
            "prompt": about["prompt_text"],
            "asked": about["messages"][-1]["content"] if "messages" in about else about["prompt_text"],
            "response": response,
            "answer": about["answer"],
            "score": float(response.strip() == about["answer"].strip()),
            "length": len(ids),
            "finish": "stop" if rollout.finished[i] else "length",
            "prompt_id": prompt_id(about["prompt_text"]),
        }

    # -- checkpoints, export, failures -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state["rows"])

    def export(self, run_dir: Path) -> None:
        export_actor(run_dir, self.actor, self.update.ema, self.tokenizer)

    def dump_failure(self, error: TooManySkips, step: int, run_dir: Path) -> str:
        """Finds the first non-finite tensor by replaying the rows; writes a dump, returns a message."""
        batch, world = error.last_skip.batch, self.context.world
        full = filled(batch, world.size)
        plan = microbatch_rows(full, 1, world)
        loss = partial(self.loss, batch=full, totals=self.totals(batch), index=step - 1)
        replayed = replay_rows({"actor": (self.actor, loss)}, plan, plan, world)
        rows = [
            {
                "location": self.rows.source.location(number),
                "prompt": self.tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False),
            }
            for number, ids, mask in zip(
                self.rows.indices(step - 1), batch.ids, batch.attention_mask, strict=True
            )
        ]
        return dump_failure(
            run_dir / "dumps" / f"step_{step:06d}",
            step,
            error.last_skip.what,
            replayed,
            rows=rows,
            place="the row {location}",
            columns=batch.tensors(),
            models=self.models,
            config=run_dir / "config.yaml",
        )
