"""Adds the score of a response to its token rewards (`algo.reward_shaping.score_position`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.ops.masked import keep, widen
from ppo_ds.ops.sequences import last_token_index, next_token_mask
from ppo_ds.types import Rollout, ScoredRollout


@dataclass(frozen=True)
class ScorePosition:
    """Determines at which position a response's score is added, and which states exist.

    "last_token" is the last action, and then only actions are states. "next_token" is the position after it,
    or the last action too if the response has its maximum length. If "next_token" is after the last action,
    it is a state with a value loss if ``next_state`` is "trained" (TRL), and a state without a value loss if
    "untrained" (DeepSpeed-Chat). If "ignored" (zysNLP), it is no state, so the score has no effect.
    """

    position: str  # last_token | next_token
    next_state: str  # trained | untrained | ignored

    def states(self, rollout: Rollout) -> Tensor:
        """Returns the mask [B,S] of the states that have rewards and advantages."""
        mask = pad(rollout.response_mask, (0, 1))
        if self.position == "last_token" or self.next_state == "ignored":
            return mask
        return torch.where(self._has_room(rollout), next_token_mask(mask), mask)

    def trained(self, rollout: Rollout) -> Tensor:
        """Returns the mask [B,S] of the states whose value is trained."""
        return self.states(rollout) if self.next_state == "trained" else pad(rollout.response_mask, (0, 1))

    def rewards(self, scores: Tensor, kl_penalty: Tensor, rollout: ScoredRollout) -> Tensor:
        """Computes the rewards [B,S] from ``scores`` [B], ``kl_penalty`` [B,R] and the token scores."""
        states, token_scores = self.states(rollout), pad(rollout.token_scores, (0, 1))
        kl_penalty = pad(kl_penalty, (0, 1))
        rewards = token_rewards(scores, states, kl_penalty, "last_token", token_scores)
        if self.position == "next_token" and self.next_state == "ignored":
            on_next = token_rewards(scores, states, kl_penalty, "next_token", token_scores)
            return torch.where(self._has_room(rollout), on_next, rewards)
        return rewards

    @staticmethod
    def _has_room(rollout: Rollout) -> Tensor:
        return (last_token_index(rollout.response_mask) + 1 < rollout.limits)[:, None]


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    mask: Tensor,
    kl_penalty: Tensor | None = None,
    place: Literal["last_token", "next_token"] = "last_token",
    token_scores: Tensor | None = None,
) -> Tensor:
    """Computes rewards [B,T]: -kl_penalty (+ token_scores) at each token, + the score [B] at one position.

    ``place``: "last_token" is the last position with mask = 1, if any; "next_token" is the position after it,
    or the last position of a full row.
    """
    scores = widen(scores)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if kl_penalty is not None:
        rewards = rewards - keep(kl_penalty, mask)
    if token_scores is not None:
        rewards = rewards + keep(token_scores, mask)
    index = last_token_index(mask)
    if place == "next_token":
        index = (index + 1).clamp(max=mask.shape[1] - 1)
    at_index = torch.arange(mask.shape[1], device=mask.device) == index[:, None]
    return rewards + torch.where(at_index, scores[:, None], 0.0)
