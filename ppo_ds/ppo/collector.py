"""Answers and their scores for one PPO step: generate, judge, and where a group baseline learns nothing from a prompt, draw another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.ppo.batching import all_gather_rows, concatenated
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.training.timing import PhaseTimer
from ppo_ds.types import Metrics, Prompts, Reward, Rollout, ScoredRollout, Scores


def scored(rollout: Rollout, scores: Scores) -> ScoredRollout:
    """The rollout with what the reward said of it."""
    total = scores.total.cpu().float()
    if fault("score"):
        total = total.clone().index_fill_(0, torch.tensor([0]), math.nan)
    components = tuple(
        {name: float(column[i]) for name, column in scores.components.items()} for i in range(len(rollout))
    )
    return ScoredRollout(
        **rollout.tensors(),
        **rollout.objects(),
        scores=total,
        token_scores=scores.per_token.cpu().float(),
        components=components,
    )


class RolloutCollector:
    """Prompts in, judged answers out, on every rank its own."""

    def __init__(
        self,
        *,
        actor: HybridActor,
        generator: Generator,
        reward: Reward,
        sampling: SamplingParams,
        timer: PhaseTimer,
        check: Callable[[], None],
    ):
        """``check``: a collective that raises, on all ranks, where what was generated or judged is not to be used (stopping.py)."""
        self.actor, self.generator, self.reward, self.sampling, self.timer, self.check = (
            actor,
            generator,
            reward,
            sampling,
            timer,
            check,
        )

    def __call__(self, prompts: Iterator[Prompts]) -> tuple[ScoredRollout, Metrics]:
        """Takes one step's worth of ``prompts``. A collective."""
        return self._judged(next(prompts)), {}

    def _judged(self, prompts: Prompts) -> ScoredRollout:
        with self.actor.generation_mode(), self.timer("generate"):
            rollout = self.generator(prompts, self.sampling)
        self.check()
        with self.timer("reward"):
            fault("reward")
            judged = scored(rollout, self.reward(rollout))  # r(x, y)
        self.check()
        return judged


class DynamicRolloutCollector(RolloutCollector):
    """DAPO's dynamic sampling (Yu et al. 2025): prompts whose answers all score alike make way for others.

    Generation goes on in whole rounds until as many prompts as one step takes are left, counted over all ranks in the order they were drawn; what
    is beyond is dropped. After ``max_rounds`` the step is filled up with prompts that were put aside, so that its size never changes.
    """

    def __init__(self, *, group_size: int, max_rounds: int, world: World, **parts):
        super().__init__(**parts)
        self.group_size, self.max_rounds, self.world = group_size, max_rounds, world

    def __call__(self, prompts: Iterator[Prompts]) -> tuple[ScoredRollout, Metrics]:
        """Every rank ends with an equal share of the chosen rows. A collective."""
        rounds: list[ScoredRollout] = []
        useful = 0
        while len(rounds) < self.max_rounds and (not rounds or useful < self._groups(rounds[0])):
            rounds.append(all_gather_rows(self._judged(next(prompts)), self.world))
            useful += int(self._differ(rounds[-1]).sum())
        everything = concatenated(rounds)
        differ = self._differ(everything)
        wanted = self._groups(rounds[0])
        chosen = torch.cat([differ.nonzero()[:, 0], (~differ).nonzero()[:, 0]])[:wanted]
        rows = (chosen[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        mine = everything.select(rows.chunk(self.world.size)[self.world.rank]).trimmed()
        return mine, {
            "rollout/rounds": float(len(rounds)),
            "rollout/useful_group_frac": useful / self._groups(everything),
            "rollout/dropped_tokens": float(
                everything.response_lengths.sum() - everything.response_lengths[rows].sum()
            ),
        }

    def _groups(self, rollout: ScoredRollout) -> int:
        return len(rollout) // self.group_size

    def _differ(self, rollout: ScoredRollout) -> Tensor:
        """[groups] bool: whether a prompt's answers differ in their scores."""
        groups = rollout.scores.view(-1, self.group_size)
        return groups.amax(1) > groups.amin(1)
