"""Shaping of scores, in this order: penalties, normalisation, fixed score of unfinished responses, clip."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_ds.config.sections.algo import RewardShapingConfig
from ppo_ds.ops.masked import Reduce, widen
from ppo_ds.ops.moments import RunningMoments
from ppo_ds.types import Rollout, ScoredRollout


@dataclass
class ScoreShaper:
    """Shapes scores according to `algo.reward_shaping`; stores the running moments of the normalisation."""

    shaping: RewardShapingConfig
    reduce: Reduce | None = None  # sums a tensor over all ranks
    moments: RunningMoments = field(default_factory=RunningMoments)

    @torch.no_grad()
    def __call__(self, rollout: ScoredRollout, update: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the shaped scores [B] and the scores before the clip [B].

        With ``update``, the scores may change the running moments, so all ranks must call this.
        """
        shaping = self.shaping
        scores = self.penalized(rollout.scores, rollout)
        first = shaping.normalize == "first" and not self.moments.count
        if update and (shaping.normalize == "running" or first):
            self.moments.update(scores, self.reduce)
        if shaping.normalize != "none":
            scores = self.moments.normalize(scores, shaping.normalize_std)
        # after normalisation, because missing_eos_value is a normalised score (Huang et al. 2024)
        if shaping.missing_eos == "set":
            scores = torch.where(rollout.finished, scores, shaping.missing_eos_value)
        return scores if shaping.clip is None else scores.clamp(-shaping.clip, shaping.clip), scores

    def penalized(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Applies the penalties for length and for a missing end token, before normalisation: [B] -> [B]."""
        shaping = self.shaping
        scores = widen(scores - shaping.length_penalty * rollout.generated_lengths)
        if shaping.missing_eos == "subtract":
            scores = torch.where(rollout.finished, scores, scores - shaping.missing_eos_value)
        if shaping.missing_eos == "scale":
            scores = torch.where(rollout.finished, scores, scores * shaping.missing_eos_value)
        if shaping.overlong_buffer is None:
            return scores
        buffer = rollout.limits.clamp(max=shaping.overlong_buffer)
        if shaping.overlong_buffer < 1:  # a fraction of the length limit
            buffer = (shaping.overlong_buffer * rollout.limits).ceil().clamp(min=1)
        # grows from 0 to overlong_factor over the last ``buffer`` tokens (DAPO)
        excess = (rollout.response_lengths - (rollout.limits - buffer)).to(scores.dtype) / buffer
        return scores - shaping.overlong_factor * excess.clamp(0, 1)

    def state_dict(self) -> dict[str, float]:
        return self.moments.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.moments.load_state_dict(state)
