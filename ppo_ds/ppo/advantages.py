"""Advantages and returns from shaped scores.

Implements `algo.action_level`, `algo.reward_shaping.score_position`, `algo.gae` and `algo.advantage`.

Shapes: B sequences, R response positions, S = R + 1 states. Column t of a [B,S] tensor is the state before
response token t. In a row of ``length`` tokens, column ``length`` is the state after the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.config.sections.algo import GAEConfig
from ppo_ds.ops.advantages import length_adaptive_lambda, normalize_advantages, one_step_advantages
from ppo_ds.ops.masked import Reduce, masked_mean, masked_sum
from ppo_ds.ops.rewards import token_rewards
from ppo_ds.ops.sequences import broadcast_sequence, last_token_index, next_token_mask
from ppo_ds.types import Rollout, ScoredRollout


@dataclass(frozen=True)
class ScorePosition:
    """Determines at which position a response's score is added, and which states exist.

    With "next_token" (DeepSpeed-Chat, TRL) the score is added one position after the last action, unless the
    response has reached its length limit. ``next_state`` determines how that position is treated:

        "trained"    an additional state that the value loss includes (TRL)
        "untrained"  an additional state that the value loss excludes (DeepSpeed-Chat)
        "ignored"    not a state, so the score has no effect (zysNLP's code)
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
        rewards = token_rewards(scores, states, kl_penalty, 1.0, "last_token", token_scores)
        if self.position == "next_token" and self.next_state == "ignored":
            on_next = token_rewards(scores, states, kl_penalty, 1.0, "next_token", token_scores)
            return torch.where(self._has_room(rollout), on_next, rewards)
        return rewards

    @staticmethod
    def _has_room(rollout: Rollout) -> Tensor:
        return (last_token_index(rollout.response_mask) + 1 < rollout.limits)[:, None]


@dataclass(frozen=True)
class Whitening:
    """Shifts and scales advantages to mean 0 and variance 1.

    The statistics are computed over tokens or, at action level sequence, over responses.
    """

    over: str  # batch | none | group | minibatch
    unbiased: bool
    level: str  # token | sequence

    def whiten(self, advantages: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Whitens all rows together: [B,R] -> [B,R]. A collective if ``reduce`` is a collective."""
        if self.level == "token":
            return normalize_advantages(advantages, mask, "batch", unbiased=self.unbiased, reduce=reduce)
        per_response = masked_mean(advantages, mask, dim=1)[:, None]
        nonempty = mask.any(dim=1, keepdim=True)
        whole = normalize_advantages(per_response, nonempty, "batch", unbiased=self.unbiased, reduce=reduce)
        return broadcast_sequence(whole[:, 0], mask)

    def whiten_rollout(self, advantages: Tensor, mask: Tensor, group_size: int, reduce: Reduce) -> Tensor:
        """Whitens a rollout: over all ranks if ``over`` is "batch", within each group if it is "group".

        A group consists of ``group_size`` consecutive rows. With other values of ``over``, the advantages do
        not change.
        """
        if self.over == "batch":
            return self.whiten(advantages, mask, reduce)
        if self.over == "group":
            groups = zip(advantages.split(group_size), mask.split(group_size), strict=True)
            return torch.cat([self.whiten(*group) for group in groups])
        return advantages

    def whiten_minibatch(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Whitens the rows of one optimizer step, from all ranks, if ``over`` is "minibatch"."""
        return self.whiten(advantages, mask) if self.over == "minibatch" else advantages


@dataclass(frozen=True)
class Estimate:
    """Advantages before whitening and, with a critic, the targets of its regression."""

    advantages: Tensor  # [B,R]
    returns: Tensor | None = None  # [B,S]
    value_mask: Tensor | None = None  # [B,S] bool: the states whose value is trained


# An estimator takes rewards [B,S], values [B,S] (None without a critic), the shaped scores [B] and the
# rollout. The functions below have this signature once their keyword arguments are bound. ``compute`` is the
# function of an entry of ADVANTAGE_ESTIMATORS in config/registry.py.
AdvantageEstimator = Callable[[Tensor, Tensor | None, Tensor, ScoredRollout], Estimate]


def estimate_by_token(
    rewards: Tensor,
    values: Tensor | None,
    scores: Tensor,
    rollout: Rollout,
    *,
    compute: Callable[..., Tensor],
    gamma: float,
    score_position: ScorePosition,
) -> Estimate:
    """Estimates one advantage per token without a critic."""
    advantages = compute(rewards, score_position.states(rollout), gamma)
    return Estimate(advantages[:, :-1].masked_fill(~rollout.response_mask, 0.0))


def estimate_by_greedy(
    rewards: Tensor,
    values: Tensor | None,
    scores: Tensor,
    rollout: ScoredRollout,
    *,
    compute: Callable[..., Tensor],
    gamma: float,
    score_position: ScorePosition,
) -> Estimate:
    """Estimates one advantage per token, relative to the score of the greedy response to the prompt."""
    advantages = compute(rewards, score_position.states(rollout), gamma, baselines=rollout.baselines)
    return Estimate(advantages[:, :-1].masked_fill(~rollout.response_mask, 0.0))


def estimate_by_group(
    rewards: Tensor,
    values: Tensor | None,
    scores: Tensor,
    rollout: Rollout,
    *,
    compute: Callable[..., Tensor],
    group_size: int,
    score_position: ScorePosition,
) -> Estimate:
    """Estimates one advantage per response, relative to the responses of its group.

    The value of a response is the sum of its rewards. A response without actions has no rewards, so its score
    is used instead, which affects the baselines of the other responses.
    """
    mask, states = rollout.response_mask, score_position.states(rollout)
    groups = torch.arange(len(rewards)) // group_size
    totals = torch.where(states.any(dim=1), masked_sum(rewards, states, dim=1), scores)
    return Estimate(broadcast_sequence(compute(totals, groups, lengths=mask.sum(1)), mask))


def estimate_by_parts(
    rewards: Tensor,
    values: Tensor | None,
    scores: Tensor,
    rollout: ScoredRollout,
    *,
    compute: Callable[..., Tensor],
    weights: Mapping[str, float],
    group_size: int,
) -> Estimate:
    """Estimates one advantage per response from the parts of its reward, relative to its group.

    ``weights`` has the names and weights of the parts. The total score and the KL are not used.
    """
    parts = torch.tensor([[row[name] for name in weights] for row in rollout.components])
    groups = torch.arange(len(parts)) // group_size
    advantages = compute(parts, groups, weights=torch.tensor(list(weights.values())))
    return Estimate(broadcast_sequence(advantages, rollout.response_mask))


def estimate_by_critic(
    rewards: Tensor,
    values: Tensor,
    scores: Tensor,
    rollout: Rollout,
    *,
    compute: Callable[..., tuple[Tensor, Tensor]],
    gae: GAEConfig,
    score_position: ScorePosition,
) -> Estimate:
    """Estimates one advantage per token and one return per state with a critic."""
    last_values = values.gather(1, rollout.response_lengths[:, None])[:, 0]  # V after the last token
    bootstrap = last_values.masked_fill(rollout.finished, 0.0) if gae.bootstrap_truncated else None
    lam: float | Tensor = gae.lam
    if gae.length_alpha is not None:
        lam = length_adaptive_lambda(rollout.response_mask.sum(1), gae.length_alpha)
    advantages, returns = compute(
        rewards, values, score_position.states(rollout), gae.gamma, lam, bootstrap, gae.lam_critic
    )
    advantages = advantages[:, :-1].masked_fill(~rollout.response_mask, 0.0)
    return Estimate(advantages, returns, score_position.trained(rollout))


def estimate_one_step(
    rewards: Tensor,
    values: Tensor,
    scores: Tensor,
    rollout: Rollout,
    *,
    value_position: str,
    score_position: ScorePosition,
) -> Estimate:
    """Estimates one advantage per response, treated as a single action: sum of rewards - V.

    With ``value_position`` "prompt_last", V is V(prompt). With "response_last" it is V(prompt, response),
    which is not a valid baseline: the advantages of a perfect critic would all be zero.
    """
    mask, states = rollout.response_mask, score_position.states(rollout)
    column = rollout.response_lengths
    if value_position == "prompt_last":
        column = torch.zeros_like(column)
    chosen = (torch.arange(values.shape[1]) == column[:, None]) & mask.any(dim=1, keepdim=True)
    totals, baseline = masked_sum(rewards, states, dim=1), masked_sum(values, chosen, dim=1)
    advantages, returns = one_step_advantages(totals, baseline, whiten=False)
    return Estimate(broadcast_sequence(advantages, mask), broadcast_sequence(returns, chosen), chosen)
