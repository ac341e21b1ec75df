"""From the reward's scores to those that PPO sees: penalties, then normalisation, then what an unfinished answer is set to, then the clip."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.ops.rewards import shape_scores
from ppo_ds.ops.running import RunningMoments
from ppo_ds.types import Rollout, ScoredRollout


@dataclass(frozen=True)
class Penalties:
    """What an answer's form costs its score, on the reward's own scale; "set" names the score itself, on the scale that PPO sees (N+)."""

    missing_eos: str | None  # subtract | set | scale
    missing_eos_value: float
    overlong_buffer: (
        float | None
    )  # tokens before the limit over which the penalty grows to overlong_factor; below 1: that share of the limit
    overlong_factor: float
    per_token: float

    def apply(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """[B] -> [B]."""
        lengths, buffer = rollout.response_lengths, self.overlong_buffer
        if buffer is not None:
            buffer = (
                (buffer * rollout.limits).ceil().clamp(min=1)
                if buffer < 1
                else rollout.limits.clamp(max=buffer)
            )
        return shape_scores(
            scores - self.per_token * lengths,
            finished=rollout.finished,
            lengths=lengths,
            max_new_tokens=rollout.limits,
            missing_eos=None if self.missing_eos == "set" else self.missing_eos,
            missing_eos_value=self.missing_eos_value,
            overlong_buffer=buffer,
            overlong_factor=self.overlong_factor,
        )

    def replaced(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """[B] -> [B], scores ready but for the clip."""
        return (
            torch.where(rollout.finished, scores, self.missing_eos_value)
            if self.missing_eos == "set"
            else scores
        )


@dataclass
class ScoreShaper:
    """``normalize``: by the moments of all scores so far ("running"), or of the first rollout's ("first"), after the penalties."""

    penalties: Penalties
    normalize: str  # none | running | first
    with_std: bool
    clip: float | None
    world: World
    moments: RunningMoments = field(default_factory=RunningMoments)

    @torch.no_grad()
    def __call__(self, rollout: ScoredRollout) -> tuple[Tensor, Tensor]:
        """The shaped scores [B], and what they were before the clip [B]. A collective where the moments are updated."""
        scores = self.penalties.apply(rollout.scores, rollout)
        if self.normalize == "running" or (self.normalize == "first" and not self.moments.count):
            self.moments.update(scores, self.world.sum)
        if self.normalize != "none":
            scores = self.moments.normalize(scores, self.with_std)
        scores = self.penalties.replaced(scores, rollout)
        return shape_scores(scores, clip=self.clip), scores

    def state_dict(self) -> dict[str, float]:
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.moments.load_state_dict(state)
