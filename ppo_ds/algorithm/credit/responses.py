"""Defines the arguments and the result of an advantage estimator.

Shapes: B responses, R response positions, S = R + 1 states. Column t of a [B,S] tensor is the state before
response token t. In a row of ``length`` tokens, column ``length`` is the state after the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.keys import GAEConfig
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.ops.masked import Reduce, masked_sum, widen
from ppo_ds.ops.sequences import broadcast_sequence
from ppo_ds.types import ScoredRollout


@dataclass(frozen=True)
class Estimate:
    """Advantages before whitening and, with a critic, the targets of the value loss."""

    advantages: Tensor  # [B,R]
    returns: Tensor | None = None  # [B,S]
    value_mask: Tensor | None = None  # [B,S] bool: the states whose value is trained


@dataclass(frozen=True, kw_only=True)
class CreditOptions:
    """Settings of the estimators."""

    gae: GAEConfig
    action_level: str = "token"  # token | sequence
    value_position: str | None = None  # at action level sequence: prompt_last | response_last
    part_weights: Mapping[str, float] = field(default_factory=dict)  # of reward=weighted, by name
    reduce: Reduce | None = None  # sums a tensor over all ranks


@dataclass(frozen=True, kw_only=True)
class Responses:
    """The responses of this rank, as the input of an advantage estimator."""

    rewards: Tensor  # [B,S] shaped scores minus any KL penalty
    scores: Tensor  # [B] shaped scores
    values: Tensor | None = None  # [B,S]; None without a critic
    mask: Tensor  # [B,R] bool: the actions
    states: Tensor  # [B,S] bool: the states that have rewards and advantages
    trained: Tensor  # [B,S] bool: the states whose value is trained
    groups: Tensor  # [B] long: equal for the responses to one prompt
    lengths: Tensor  # [B] long: number of attended tokens
    finished: Tensor  # [B] bool
    components: tuple[dict[str, float], ...] = ()  # B dicts: name -> part of the score
    baselines: Tensor | None = None  # [B] shaped score of a greedy response to the prompt (ReMax)

    @classmethod
    def of_rollout(
        cls,
        rollout: ScoredRollout,
        position: ScorePosition,
        rewards: Tensor,
        scores: Tensor,
        values: Tensor | None,
        group_size: int,
    ) -> Responses:
        """Makes the responses of a rollout; each ``group_size`` consecutive rows have the same prompt."""
        return cls(
            rewards=rewards,
            scores=scores,
            values=values,
            mask=rollout.response_mask,
            states=position.states(rollout),
            trained=position.trained(rollout),
            groups=torch.arange(len(rewards)) // group_size,
            lengths=rollout.response_lengths,
            finished=rollout.finished,
            components=rollout.components,
            baselines=rollout.baselines,
        )

    @property
    def totals(self) -> Tensor:
        """Total reward of each response [B]: the sum of its rewards, or its score if it has no actions."""
        return torch.where(self.states.any(dim=1), masked_sum(self.rewards, self.states, dim=1), self.scores)

    def of_responses(self, advantages: Tensor) -> Estimate:
        """Returns an estimate that gives each action its response's entry of ``advantages`` [B]."""
        return Estimate(broadcast_sequence(advantages.to(widen(self.totals).dtype), self.mask))

    def of_tokens(
        self, advantages: Tensor, returns: Tensor | None = None, value_mask: Tensor | None = None
    ) -> Estimate:
        """Returns an estimate that keeps the ``advantages`` [B,S] of the actions; all others become 0."""
        return Estimate(advantages[:, :-1].masked_fill(~self.mask, 0.0), returns, value_mask)


AdvantageEstimator = Callable[[Responses, CreditOptions], Estimate]
