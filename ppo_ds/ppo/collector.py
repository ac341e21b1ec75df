"""Collection of the scored rollout of one PPO step: generation and scoring, in one or several rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.ppo.batching import all_gather_rows, concatenate
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.training.timing import PhaseTimer
from ppo_ds.types import Metrics, Prompts, Reward, Rollout, ScoredRollout, Scores


def scored(rollout: Rollout, scores: Scores) -> ScoredRollout:
    """Combines a rollout and its scores into a ScoredRollout on the CPU."""
    components = tuple(
        {name: float(column[i]) for name, column in scores.components.items()} for i in range(len(rollout))
    )
    return ScoredRollout(
        **rollout.tensors(),
        **rollout.objects(),
        scores=scores.total.cpu().float(),
        token_scores=scores.per_token.cpu().float(),
        components=components,
    )


@dataclass(kw_only=True)
class RolloutCollector:
    """Generates responses to the next prompts and scores them. Each rank has its own prompts."""

    actor: HybridActor
    generator: Generator
    reward: Reward
    sampling: SamplingParams
    timer: PhaseTimer
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request

    def __call__(self, prompts: Iterator[Prompts]) -> tuple[ScoredRollout, Metrics]:
        """Collects a rollout for the next prompts and returns it with metrics. A collective."""
        return self.collect(next(prompts)), {}

    def collect(self, prompts: Prompts) -> ScoredRollout:
        """Generates and scores one round. A collective."""
        with self.actor.generation_mode(), self.timer("generate"):
            rollout = self.generator(prompts, self.sampling)
        self.check()
        with self.timer("reward"):
            fault("reward")
            result = scored(rollout, self.reward(rollout))  # r(x, y)
        self.check()
        return result


@dataclass(kw_only=True)
class DynamicRolloutCollector(RolloutCollector):
    """DAPO's dynamic sampling (Yu et al. 2025): replaces prompts whose responses all have the same score.

    Generation runs in whole rounds until all ranks together have enough prompts whose responses differ in
    score. Prompts are used in the order in which they were drawn, and the surplus is dropped. If
    ``max_rounds`` rounds are not enough, prompts with equal scores fill the batch, so its size never changes.
    """

    group_size: int
    max_rounds: int
    world: World

    def __call__(self, prompts: Iterator[Prompts]) -> tuple[ScoredRollout, Metrics]:
        """Collects a rollout in rounds; returns this rank's equal share of the chosen rows. A collective."""
        first = all_gather_rows(self.collect(next(prompts)), self.world)
        rounds, wanted = [first], len(first) // self.group_size
        useful = int(self._scores_differ(first).sum())
        while useful < wanted and len(rounds) < self.max_rounds:
            rounds.append(all_gather_rows(self.collect(next(prompts)), self.world))
            useful += int(self._scores_differ(rounds[-1]).sum())
        all_rows = concatenate(rounds)
        differ = self._scores_differ(all_rows)
        chosen = torch.cat([differ.nonzero()[:, 0], (~differ).nonzero()[:, 0]])[:wanted]
        rows = (chosen[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        mine = all_rows.select(rows.chunk(self.world.size)[self.world.rank]).trimmed()
        dropped = all_rows.response_lengths.sum() - all_rows.response_lengths[rows].sum()
        return mine, {
            "rollout/rounds": float(len(rounds)),
            "rollout/useful_group_frac": useful / (len(all_rows) // self.group_size),
            "rollout/dropped_tokens": float(dropped),
        }

    def _scores_differ(self, rollout: ScoredRollout) -> Tensor:
        """Returns, for each group, whether its scores differ: [groups] bool."""
        groups = rollout.scores.view(-1, self.group_size)
        return groups.amax(1) > groups.amin(1)
