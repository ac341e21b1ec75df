"""Evaluation: generates and scores responses to held-out prompts or, without these, to training prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.rng import fork_rng
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.collector import StartScoring, wait_for_scores
from ppo_ds.ppo.sample_rows import about_prompt, grouped, response_columns
from ppo_ds.ppo.win_rate import ReferenceResponses, Rows, win_rate
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.stage import HELD_OUT, Evaluation
from ppo_ds.types import Prompts, Rollout, Scores

PHASE = "in an evaluation"


@dataclass
class Evaluator:
    """Evaluates the current policy on this rank's share of the evaluation prompts."""

    # (prompts, weights [b]); rows that only fill up a batch have weight 0. Every rank has the same number of
    # batches.
    batches: list[tuple[Prompts, Tensor]]
    _: KW_ONLY
    actor: HybridActor
    generator: Generator
    start_scoring: StartScoring
    more_scoring: Mapping[str, StartScoring]  # eval.rewards, by name
    sampling: SamplingParams
    correct_above: float | None  # a higher score counts as a correct response in eval/accuracy
    reference: ReferenceResponses | None  # None: the win rate is not measured
    tokenizer: Tokenizer
    world: World
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request
    data: str = HELD_OUT  # see Evaluation.data
    by: str | None = None  # the column by which rows are grouped for mean scores

    @torch.no_grad()
    def __call__(self) -> Evaluation:
        """Runs one evaluation, then restores the random states of the training. All ranks must call this."""
        before = heartbeat.enter(PHASE)
        with fork_rng(self.world):
            sums, rows = MetricSums(), []
            for rollout, (_, weights) in zip(self.generate_all(), self.batches, strict=True):
                scored, counted = self.score(rollout, self.start_scoring), weights.bool()
                scores = scored.sums
                more = {name: self.score(rollout, start).sums for name, start in self.more_scoring.items()}
                sums.add_mean_and_std(f"{self.data}/score", scores, counted)
                sums.add_mean(f"{self.data}/resp_len_mean", rollout.response_lengths, counted)
                sums.add_mean(f"{self.data}/stop_frac", rollout.finished, counted)
                if self.correct_above is not None:
                    sums.add_mean(f"{self.data}/accuracy", scores > self.correct_above, counted)
                for name, column in more.items():
                    sums.add_mean_and_std(f"eval/{name}", column, counted)
                rows += self.sample_rows(rollout, scored, counted, more)
            rows = self.gathered(rows)
            metrics = sums.reduced(self.world)
            for value, group in grouped(rows, self.by).items() if self.by else ():
                metrics[f"{self.data}/score_mean/{value}"] = fmean(row["score"] for row in group)
            others = self.reference_rows(rows) if self.reference is not None else None
            if others is not None:
                metrics["eval/win_rate_vs_ref"] = win_rate(rows, others)
                rows = [
                    row | {"ref_response": other["response"], "ref_score": other["score"]}
                    for row, other in zip(rows, others, strict=True)
                ]
        heartbeat.enter(*before)
        return Evaluation(metrics, rows, self.data)

    def generate_all(self) -> list[Rollout]:
        """Generates all responses in one generation phase. All ranks must call this."""
        rollouts = []
        with self.actor.generation_mode(), heartbeat.counting(len(self.batches), "batches") as done:
            for prompts, _ in self.batches:
                with _heartbeat_phase("generating"):
                    rollouts.append(self.generator(prompts, self.sampling))
                self.check()
                done(len(rollouts))
        return rollouts

    def reference_rows(self, own: list[dict[str, Any]]) -> Rows | None:
        """Returns sample rows of the reference's responses to the prompts of the policy's rows ``own``.

        All ranks must call this. Returns None if no rows are stored and no reference model is loaded.
        """
        reference = self.reference
        assert reference is not None
        if reference.is_initial_actor and self.actor.steps == 0:
            return reference.keep(own)
        if (known := reference.find([row["prompt"] for row in own])) is not None:
            return known
        if reference.generate is None:
            reference.warn()
            return None
        with _heartbeat_phase("generating with the reference"):
            rollouts = reference.generate([prompts for prompts, _ in self.batches])
        self.check()
        rows = []
        for rollout, (_, weights) in zip(rollouts, self.batches, strict=True):
            rows += self.sample_rows(rollout, self.score(rollout, self.start_scoring), weights.bool(), {})
        return reference.keep(self.gathered(rows))

    def gathered(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows of all ranks, in the order of the prompts. All ranks must call this."""
        return [row for part in self.world.gather_objects(rows) for row in part]

    def score(self, rollout: Rollout, start_scoring: StartScoring) -> Scores:
        """Returns the scores of a rollout by one reward. All ranks must call this."""
        with _heartbeat_phase("in the reward"):
            scores = wait_for_scores(start_scoring(rollout), self.world, self.check)
        self.check()
        return scores

    def sample_rows(
        self, rollout: Rollout, scores: Scores, counted: Tensor, more: Mapping[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Returns a sample row (see sample_rows.py) for each response with True in ``counted`` [b].

        ``more`` maps the name of each reward in eval.rewards to its scores [b].
        """
        rows, sums = [], scores.sums
        for i in counted.nonzero().flatten().tolist():
            notes = {"episode_end": rollout.episode_ends[i]} if rollout.episode_ends else {}
            if scores.components:
                notes["components"] = {name: float(column[i]) for name, column in scores.components.items()}
            row = {
                "prompt": rollout.metadata[i]["prompt_text"],
                **about_prompt(rollout.metadata[i]),
                **response_columns(rollout, i, float(sums[i]), notes, self.tokenizer),
            }
            if more:
                row["rewards"] = {name: float(column[i]) for name, column in more.items()}
            rows.append(row)
        return rows


@contextmanager
def _heartbeat_phase(what: str) -> Iterator[None]:
    """Sets the heartbeat's phase to ``what`` inside the block; the PhaseTimer keeps its phase."""
    heartbeat.enter(f"{what}, {PHASE}")
    yield
    heartbeat.enter(PHASE)
