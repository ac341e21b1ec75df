"""Held-out evaluation: the current policy answers prompts it never trains on, and the reward judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.rng import fork_rng
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.training.metrics import MetricSums
from ppo_ds.training.stage import Evaluation
from ppo_ds.types import Prompts, Reward, Rollout, Row

_PLACE = "in an evaluation"


class Evaluator:
    def __init__(
        self,
        batches: list[tuple[Prompts, Tensor]],
        *,
        actor: HybridActor,
        generator: Generator,
        reward: Reward,
        sampling: SamplingParams,
        correct_above: float | None,
        tokenizer: Tokenizer,
        world: World,
        check: Callable[[], None],
    ):
        """``batches``: this rank's prompts and their weights [b] (0 for rows that only fill a batch up), as many batches on every rank.

        ``correct_above``: a score above it counts as a right answer in eval/accuracy. ``check``: a collective that raises, on all ranks, where
        the evaluation is to be left (stopping.py).
        """
        self.batches = batches
        self.actor = actor
        self.generator = generator
        self.reward = reward
        self.sampling = sampling
        self.correct_above = correct_above
        self.tokenizer = tokenizer
        self.world = world
        self.check = check

    @torch.no_grad()
    def __call__(self) -> Evaluation:
        """A collective. Whatever it draws, the training goes on as if it had not been."""
        before = heartbeat.enter(_PLACE)
        with fork_rng(self.world):
            found = self._evaluation()
        heartbeat.enter(*before)
        return found

    def _evaluation(self) -> Evaluation:
        sums = MetricSums()
        rows: list[dict[str, Any]] = []
        with (
            self.actor.generation_mode()
        ):  # once for all of them: a switch may gather weights and move states
            rollouts = [self._answers(prompts) for prompts, _ in self.batches]
        for rollout, (_, weights) in zip(rollouts, self.batches, strict=True):
            with _doing("in the reward"):
                scores = self.reward(rollout).total
            self.check()
            counted = weights.bool()
            sums.add_spread("eval/score", scores, counted)
            sums.add_mean("eval/resp_len_mean", rollout.response_mask.sum(1), counted)
            sums.add_mean("eval/stop_frac", rollout.finished, counted)
            if self.correct_above is not None:
                sums.add_mean("eval/accuracy", scores > self.correct_above, counted)
            rows += self._rows(rollout, scores, counted)
        everyone = [row for part in self.world.gather_objects(rows) for row in part]
        return Evaluation(sums.reduced(self.world), everyone)

    def _answers(self, prompts: Prompts) -> Rollout:
        with _doing("generating"):
            rollout = self.generator(prompts, self.sampling)
        self.check()
        return rollout

    def _rows(self, rollout: Rollout, scores: Tensor, counted: Tensor) -> list[dict[str, Any]]:
        answers = rollout.ids[:, rollout.prompt_width :]
        return [
            {
                "prompt": rollout.metadata[i]["prompt_text"],
                "asked": asked(rollout.metadata[i]),
                "response": self.tokenizer.decode(answers[i][rollout.response_mask[i]].tolist()),
                "score": float(scores[i]),
                "length": int(rollout.response_mask[i].sum()),
                "finish": "stop" if rollout.finished[i] else "length",
            }
            for i in counted.nonzero().flatten().tolist()
        ]


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """For heartbeat.py alone: the seconds are those of the phase around it, which the first evaluation does without."""
    heartbeat.enter(f"{what}, {_PLACE}")
    yield
    heartbeat.enter(_PLACE)


def asked(row: Row) -> str:
    """What a person would call the prompt: of a chat, the last message without the template around it."""
    return row["messages"][-1]["content"] if "messages" in row else row["prompt_text"]
