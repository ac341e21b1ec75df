"""Reward-model stage: trains a scalar score of texts on preference pairs (Ouyang et al. 2022, section 3.5).

One step is one optimizer step on a batch of pairs:
  1. next(rows)    the pairs of the step, the same on every rank
  2. update        forward and backward over this rank's micro-batches, then the optimizer step

The loss is pairwise.py:pairwise_loss, averaged exactly over all pairs of the step. Departures from
InstructGPT: a row with several ranked answers is not weighted by 1 / (K choose 2) and not computed in one
forward (data/preferences.py), and a loss term keeps scores around 0 (reward_model.centering).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_ds.config.sections.finetune import RewardModelConfig
from ppo_ds.data.preferences import PreferenceSource
from ppo_ds.data.prompts import prompt_id
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.finetune.optimizer_step import FinetuneStage, Parts
from ppo_ds.finetune.pair_scores import PairScores, pair_plan, score_pairs, score_source
from ppo_ds.finetune.pairwise import pairwise_loss
from ppo_ds.run.export import export_model
from ppo_ds.run.failure_dump import dump_failure
from ppo_ds.run.health import TooManySkips
from ppo_ds.run.microbatches import padding
from ppo_ds.run.nan_debug import replay_rows
from ppo_ds.run.stage import Evaluation, StepResult
from ppo_ds.types import PreferencePairs, to_device

MEASURED = 1024  # training pairs from which score_mean and score_std are computed without held-out data
LEAST_STD = 1e-8  # score_std of a model with equal scores for all texts


@dataclass(kw_only=True)
class RewardModelTrainer(FinetuneStage[PreferenceSource, PreferencePairs]):
    """The reward-model stage. ``tokenizer`` is exported with the model and has its pad token."""

    config: RewardModelConfig
    evaluate_ema: bool
    samples: int | None  # held-out pairs in the samples file; None: all
    scorer: TrainedModel
    saved_settings: Mapping[str, Any]  # entries of the exported config.json on the format of the texts

    # (averaged weights?, optimizer steps) -> scores, which evaluation and export share
    measured: dict[tuple[bool, int], PairScores] = field(init=False, default_factory=dict)

    def step(self, index: int) -> StepResult:
        pairs = self.next_rows()
        full = pairs.filled(self.context.world.size)
        packed = self.scorer.module.packed
        plan = pair_plan(full, self.train_tokens, self.context.world, packed)
        micros = [full.select(part).trimmed() for part in plan]
        with self.context.budgets.ending(self.context.budgets.train, "the update"):
            metrics = self.update(pairs, micros, partial(self.loss, count=len(pairs)))
        padded, tokens = self.context.world.sum(padding(micros, packed)).tolist()
        lengths = pairs.lengths.flatten()
        metrics |= {
            "perf/pad_frac_update": padded / tokens,
            "rm/text_len_mean": float(lengths.double().mean()),
            "rm/epoch": self.rows.epoch,
        }
        return StepResult(
            metrics=metrics,
            episodes=len(pairs),
            tokens=int(lengths.sum()),
            performance=partial(
                self.update.performance, lengths.tolist(), head_positions=0, samples=len(pairs)
            ),
        )

    def loss(self, micro: PreferencePairs, count: int) -> tuple[Tensor, Parts]:
        """Computes a micro-batch's part of the loss over ``count`` pairs on all ranks, and its metrics."""
        scores = score_pairs(self.scorer, micro)
        rows = to_device(micro.counted.nonzero()[:, 0], scores.device)
        scores = scores[rows]
        loss, parts = pairwise_loss(
            scores[:, 0],
            scores[:, 1],
            margins=to_device(micro.margins, scores.device)[rows] if self.config.margin else None,
            centering=self.config.centering,
            label_smoothing=self.config.label_smoothing,
            pairs=count,
            dp_size=self.context.world.size,
        )
        both = scores.detach().double()
        return loss, parts | {"rm/score_mean": torch.stack([both.sum(), both.new_full((), both.numel())])}

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self) -> Evaluation | None:
        if self.held_out is None:
            return None
        with self.context.timer("eval"):
            found = self.measure(averaged=self.evaluate_ema, check=self.context.stop.raise_if_stopped)
        return Evaluation(found.metrics(), self.sample_rows(found, self.held_out))

    def measure(self, *, averaged: bool, check: Callable[[], None] = lambda: None) -> PairScores:
        """Returns the scores of the held-out pairs, or of training pairs if there are none.

        All ranks must call this. ``check`` may raise Abandoned after a stop request. An export passes no
        ``check``, so that it is not abandoned.
        """
        key = (averaged, self.scorer.steps)
        if key not in self.measured:
            budgets = self.context.budgets
            with budgets.ending(budgets.score, "the evaluation"), self.weights(averaged):
                scores = score_source(
                    self.scorer,
                    self.held_out or self.rows.source,
                    most=self.eval_rows if self.held_out else MEASURED,
                    token_budget=self.score_tokens,
                    packed=self.scorer.module.packed,
                    check=check,
                )
            # scores of earlier steps are not needed again
            self.measured = {k: v for k, v in self.measured.items() if k[1] == key[1]} | {key: scores}
        return self.measured[key]

    def weights(self, averaged: bool) -> AbstractContextManager[None]:
        """Returns a context manager that swaps in the averaged weights if ``averaged``."""
        return self.update.ema.swapped() if averaged and self.update.ema is not None else nullcontext()

    def sample_rows(self, found: PairScores, source: PreferenceSource) -> list[dict[str, Any]]:
        """Returns the first pairs of a source with their scores, for the samples file and the report."""
        rows = []
        for i, (chosen, rejected) in enumerate(found.scores[: self.samples].tolist()):
            preferred_text, rejected_text = source.texts(i)
            rows.append(
                {
                    "prompt": f"{i}: {preferred_text}",
                    "rejected": rejected_text,
                    "asked": preferred_text,
                    "response": f"preferred {chosen:.2f}, rejected {rejected:.2f}",
                    "score": chosen - rejected,
                    "subset": found.subsets[i],
                    "prompt_id": prompt_id(preferred_text),
                }
            )
        return rows

    # -- checkpoints, export, failures -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, and the settings for an export of the checkpoint."""
        names = ["model"] if self.update.ema is None else ["model", "ema"]
        exports = {name: self.export_settings(averaged=name == "ema") for name in names}
        return {"pairs": self.rows.state_dict(), "export": exports}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state["pairs"])
        self.measured = {}  # after a rollback, other weights can have the same number of steps

    def export(self, run_dir: Path) -> None:
        """Writes model/, and model_ema/ if weights are averaged, for AutoModelForSequenceClassification."""
        self.export_weights(run_dir / "model", averaged=False)
        if self.update.ema is not None:
            self.export_weights(run_dir / "model_ema", averaged=True)

    def export_weights(self, folder: Path, *, averaged: bool) -> None:
        """Writes the weights or averaged weights, with the mean and standard deviation of their scores."""
        self.measure(averaged=averaged)
        save = partial(self.scorer.module.save, **self.export_settings(averaged=averaged))
        with self.weights(averaged):
            export_model(self.scorer, "model.", folder, save, self.tokenizer)

    def export_settings(self, *, averaged: bool) -> dict[str, Any]:
        """Returns the arguments of ``ScoreModel.save``, with statistics of scores if they were measured."""
        settings = dict(self.saved_settings)
        if (found := self.measured.get((averaged, self.scorer.steps))) is not None:
            mean, std = found.mean_and_std()
            settings |= {"score_mean": mean, "score_std": max(std, LEAST_STD)}
        return {"settings": settings, "pad_id": self.tokenizer.pad_id}

    def dump_failure(self, error: TooManySkips, step: int, run_dir: Path) -> str:
        """Finds the first non-finite tensor by replaying the pairs; writes a dump, returns a message."""
        pairs, world = error.last_skip.batch, self.context.world
        full = pairs.filled(world.size)
        plan = pair_plan(full, 1, world, packed=False)
        micros = [full.select(part).trimmed() for part in plan]
        loss = partial(self.loss, count=len(pairs))
        replayed = replay_rows({"scorer": (self.scorer, loss)}, plan, micros, world)
        texts = [
            [
                self.tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
                for ids, mask in zip(*pair, strict=True)
            ]
            for pair in zip(pairs.ids, pairs.mask, strict=True)
        ]
        return dump_failure(
            run_dir / "dumps" / f"step_{step:06d}",
            step,
            error.last_skip.what,
            replayed,
            rows=[{"pair": i, "prompt": chosen, "rejected": no} for i, (chosen, no) in enumerate(texts)],
            place="pair {pair} of the step",
            columns=pairs.tensors(),
            models=self.models,
            config=run_dir / "config.yaml",
        )
