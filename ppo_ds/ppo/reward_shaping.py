"""Shaping of scores, in this order: penalties, normalisation, fixed score of truncated responses, clip."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_ds.config.sections.algo import RewardShapingConfig
from ppo_ds.distributed.world import World
from ppo_ds.ops.rewards import shape_scores
from ppo_ds.ops.running import RunningMoments
from ppo_ds.types import Rollout, ScoredRollout


@dataclass
class ScoreShaper:
    """Shapes scores according to `algo.reward_shaping`; keeps the running moments that normalise them."""

    shaping: RewardShapingConfig
    world: World
    moments: RunningMoments = field(default_factory=RunningMoments)

    @torch.no_grad()
    def __call__(self, rollout: ScoredRollout, update: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the shaped scores [B] and the scores before the clip [B].

        A collective if the running moments are updated; ``update=False`` leaves them as they are.
        """
        shaping = self.shaping
        scores = self.penalized(rollout.scores, rollout)
        first = shaping.normalize == "first" and not self.moments.count
        if update and (shaping.normalize == "running" or first):
            self.moments.update(scores, self.world.sum)
        if shaping.normalize != "none":
            scores = self.moments.normalize(scores, shaping.normalize_std)
        # after normalisation, since missing_eos_value is a shaped score (Huang et al. 2024)
        if shaping.missing_eos == "set":
            scores = torch.where(rollout.finished, scores, shaping.missing_eos_value)
        return shape_scores(scores, clip=shaping.clip), scores

    def penalized(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Applies the penalties for length and for a missing end token, before normalisation: [B] -> [B]."""
        shaping, lengths, buffer = self.shaping, rollout.response_lengths, self.shaping.overlong_buffer
        if buffer is not None and buffer < 1:  # a fraction of the length limit
            buffer = (buffer * rollout.limits).ceil().clamp(min=1)
        elif buffer is not None:
            buffer = rollout.limits.clamp(max=buffer)
        return shape_scores(
            scores - shaping.length_penalty * rollout.generated_lengths,
            finished=rollout.finished,
            lengths=lengths,
            max_new_tokens=rollout.limits,
            missing_eos=None if shaping.missing_eos == "set" else shaping.missing_eos,
            missing_eos_value=shaping.missing_eos_value,
            overlong_buffer=buffer,
            overlong_factor=shaping.overlong_factor,
        )

    def state_dict(self) -> dict[str, float]:
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.moments.load_state_dict(state)
