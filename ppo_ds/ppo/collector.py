"""Collects the rollout of one PPO step: generation and scoring, in one or several rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ppo_ds.background.pending import Pending, all_of, start_all, wait_on_all_ranks
from ppo_ds.data.difficulty import Difficulty
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.ppo.minibatches import all_gather_rows, concatenate
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.types import Metrics, Prompts, Rollout, ScoredRollout, Scores

# a function that starts to score a rollout
StartScoring = Callable[[Rollout], Pending[Scores]]


@dataclass(kw_only=True)
class RolloutCollector:
    """Generates responses to this rank's next prompts and starts to score them."""

    prompts: Iterator[Prompts]
    actor: HybridActor
    generator: Generator
    start_scoring: StartScoring
    sampling: SamplingParams
    timer: PhaseTimer
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request
    difficulty: Difficulty | None = None  # draws the prompts by their last scores

    def __call__(self) -> tuple[Rollout, Pending[Scores], Metrics]:
        """Returns (rollout of the next prompts, its pending scores, metrics). All ranks must call this."""
        return *self.collect(next(self.prompts)), self.drawing

    def collect(self, prompts: Prompts) -> tuple[Rollout, Pending[Scores]]:
        """Generates responses to ``prompts`` and starts to score them. All ranks must call this."""
        with self.actor.generation_mode(), self.timer("generate"):
            rollout = self.generator(prompts, self.sampling)
        self.check()
        return rollout, self.score(rollout).then(self.observed)

    def score(self, rollout: Rollout) -> Pending[Scores]:
        """Starts to score a rollout. All ranks must call this."""
        assert int(rollout.response_lengths.min()) > 0, "a response has at least one token"
        with self.timer("reward"):
            fault("reward")
            scores = self.start_scoring(rollout)  # r(x, y)
        self.check()
        return scores

    def observed(self, scores: Scores) -> Scores:
        """Passes ``scores`` to data.difficulty, if set, and returns ``scores``. All ranks must call this."""
        if self.difficulty is not None:
            self.difficulty.observe(scores.sums)
        return scores

    @property
    def drawing(self) -> Metrics:
        """The metrics of data.difficulty for its last draw of prompts."""
        return {} if self.difficulty is None else self.difficulty.metrics


@dataclass(kw_only=True)
class GreedyRolloutCollector(RolloutCollector):
    """Also generates and scores a greedy response to each prompt, the baseline of ReMax (Li et al. 2024)."""

    group_size: int  # consecutive rows with the same prompt
    world: World

    def __call__(self) -> tuple[Rollout, Pending[Scores], Metrics]:
        """Collects a rollout, with greedy responses in ``Scores.greedy``. All ranks must call this."""
        rows = next(self.prompts)
        with self.actor.generation_mode(), self.timer("generate"):
            rollout = self.generator(rows, self.sampling)
            one_each = rows.select(torch.arange(0, len(rows), self.group_size))
            greedy = self.generator(one_each, self.sampling.as_greedy())
        self.check()
        pending = start_all(self.score(part) for part in (rollout, greedy))
        scores = all_of(pending).then(
            lambda found: replace(self.observed(found[0]), greedy=scored(greedy, found[1]))
        )
        tokens = self.world.sum(greedy.response_lengths.sum().reshape(1).double())
        return rollout, scores, self.drawing | {"rollout/greedy_tokens": float(tokens)}


@dataclass(kw_only=True)
class DynamicRolloutCollector(RolloutCollector):
    """DAPO's dynamic sampling (Yu et al. 2025): replaces prompts whose responses all have the same score.

    Rounds run until all ranks together have a full batch of prompts whose responses differ in score. After
    ``max_rounds`` rounds, prompts with equal scores fill up the batch, so that its size is constant.
    """

    group_size: int
    max_rounds: int
    world: World

    def __call__(self) -> tuple[Rollout, Pending[Scores], Metrics]:
        """Collects a rollout in rounds; returns this rank's share of the rows. All ranks must call this."""
        first = self.collect_scored(next(self.prompts))
        rounds, wanted = [first], len(first) // self.group_size
        useful = int(self._scores_differ(first).sum())
        while useful < wanted and len(rounds) < self.max_rounds:
            rounds.append(self.collect_scored(next(self.prompts)))
            useful += int(self._scores_differ(rounds[-1]).sum())
        all_rows = concatenate(rounds)
        differ = self._scores_differ(all_rows)
        chosen = torch.cat([differ.nonzero()[:, 0], (~differ).nonzero()[:, 0]])[:wanted]
        rows = (chosen[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        mine = all_rows.select(rows.chunk(self.world.size)[self.world.rank]).trimmed()
        dropped = all_rows.generated_lengths.sum() - all_rows.generated_lengths[rows].sum()
        metrics = {
            "rollout/rounds": float(len(rounds)),
            "rollout/useful_group_frac": useful / (len(all_rows) // self.group_size),
            "rollout/dropped_tokens": float(dropped),
        }
        return mine, Pending.of(scores_of(mine)), self.drawing | metrics

    def collect_scored(self, prompts: Prompts) -> ScoredRollout:
        """Generates and scores one round; returns the rows of all ranks. All ranks must call this."""
        rollout, pending = self.collect(prompts)
        with self.timer("reward"):
            scores = wait_for_scores(pending, self.world, self.check)
        return all_gather_rows(scored(rollout, scores), self.world)

    def _scores_differ(self, rollout: ScoredRollout) -> Tensor:
        """Returns for each group whether its responses have different scores, [groups] bool."""
        groups = rollout.score_sums.view(-1, self.group_size)
        return groups.amax(1) > groups.amin(1)


def wait_for_scores(pending: Pending[Scores], world: World, check: Callable[[], None]) -> Scores:
    """Waits until every rank has its scores; returns those of this rank. All ranks must call this."""
    if not pending.tasks:
        return pending.result()
    return wait_on_all_ranks(pending, world, check)


def scored(rollout: Rollout, scores: Scores) -> ScoredRollout:
    """Combines a rollout and its scores into a ScoredRollout on the CPU.

    Token scores outside the action mask, such as those of masked end tokens, are added to the score of the
    previous action, or of the first action if none precedes. In a row without actions they are dropped.
    """
    mask, token_scores = rollout.response_mask.cpu(), scores.per_token.cpu().float()
    positions = torch.arange(mask.shape[1]).expand(mask.shape)
    before = torch.where(mask, positions, -1).cummax(1).values
    first = mask.long().argmax(1, keepdim=True)
    target = torch.where(before < 0, first, before)
    moved = torch.zeros_like(token_scores).scatter_add(1, target, token_scores.masked_fill(mask, 0.0))
    token_scores = (token_scores + moved).masked_fill(~mask, 0.0)
    columns = {name: column.tolist() for name, column in scores.components.items()}
    components = tuple({name: column[i] for name, column in columns.items()} for i in range(len(rollout)))
    return ScoredRollout(
        **{field.name: getattr(rollout, field.name) for field in fields(Rollout)},
        scores=scores.total.cpu().float(),
        token_scores=token_scores,
        components=components,
    )


def scores_of(rollout: ScoredRollout) -> Scores:
    """Converts the score columns of a rollout to Scores."""
    components = {
        name: torch.tensor([parts[name] for parts in rollout.components]) for name in rollout.components[0]
    }
    return Scores(rollout.scores, rollout.token_scores, components)
