"""From scored answers to advantages and returns: what `algo.action_level`, `algo.reward_shaping.score_position`, `algo.gae` and `algo.advantage` choose between.

B sequences, R response places, S = R + 1 states: column t of a [B,S] tensor is the state before response token t, column `length` the one
after the last token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.ops.advantages import compute_gae, discounted_returns, group_advantages, normalize_advantages
from ppo_ds.ops.masked import Reduce, masked_mean
from ppo_ds.ops.rewards import token_rewards
from ppo_ds.ops.sequences import broadcast_sequence, last_token_index, next_token_mask
from ppo_ds.types import Rollout

GROUP_ESTIMATORS = ("rloo", "grpo", "dr_grpo", "opo")  # judge an answer by the other answers to its prompt


@dataclass(frozen=True)
class ScorePosition:
    """Where an answer's score is paid, and which states that makes.

    With "next_token" (DeepSpeed-Chat, TRL) the place after the last action is a state of its own, unless the answer fills its limit.
    ``next_state``: "trained" by the value loss too (TRL), "untrained" (DeepSpeed-Chat), or "ignored": the score is lost (zysNLP's code).
    """

    place: str  # last_token | next_token
    next_state: str  # trained | untrained | ignored

    def states(self, rollout: Rollout) -> Tensor:
        """[B,S] bool: the states that rewards and advantages run over."""
        mask = padded(rollout.response_mask)
        if self.place == "last_token" or self.next_state == "ignored":
            return mask
        return torch.where(self._has_room(rollout), next_token_mask(mask), mask)

    def trained(self, rollout: Rollout) -> Tensor:
        """[B,S] bool: the states whose value is learned."""
        return self.states(rollout) if self.next_state == "trained" else padded(rollout.response_mask)

    def rewards(
        self, scores: Tensor, rollout: Rollout, kl: Tensor, kl_coef: float, token_scores: Tensor
    ) -> Tensor:
        """scores [B], kl and token_scores [B,R] -> [B,S]."""
        states, kl, token_scores = self.states(rollout), padded(kl), padded(token_scores)
        rewards = token_rewards(scores, states, kl, kl_coef, token_scores=token_scores)
        if (
            self.place == "next_token" and self.next_state == "ignored"
        ):  # paid where no state is, if there is such a place
            return torch.where(
                self._has_room(rollout),
                token_rewards(scores, states, kl, kl_coef, "next_token", token_scores),
                rewards,
            )
        return rewards

    @staticmethod
    def _has_room(rollout: Rollout) -> Tensor:
        return (last_token_index(rollout.response_mask) + 1 < rollout.limits)[:, None]


def padded(x: Tensor) -> Tensor:
    """[B,R] -> [B,S]: nothing in the state after the last place."""
    return torch.nn.functional.pad(x, (0, 1))


@dataclass(frozen=True)
class Whitening:
    """Advantages to mean 0 and variance 1, per token, or at level sequence per answer."""

    over: str  # batch | none | group | minibatch
    unbiased: bool
    level: str  # token | sequence

    def whitened(self, advantages: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
        """All rows together: [B,R] -> [B,R]. A collective where ``reduce`` is one."""
        if self.level == "token":
            return normalize_advantages(advantages, mask, "batch", unbiased=self.unbiased, reduce=reduce)
        answers = mask.any(dim=1, keepdim=True)
        whole = normalize_advantages(
            masked_mean(advantages, mask, dim=1)[:, None],
            answers,
            "batch",
            unbiased=self.unbiased,
            reduce=reduce,
        )
        return broadcast_sequence(whole[:, 0], mask)

    def in_rollout(self, advantages: Tensor, mask: Tensor, group_size: int, reduce: Reduce) -> Tensor:
        """What is done while the experience is made."""
        if self.over == "batch":
            return self.whitened(advantages, mask, reduce)
        if self.over == "group":
            groups = zip(advantages.split(group_size), mask.split(group_size), strict=True)
            return torch.cat([self.whitened(*group) for group in groups])
        return advantages

    def in_minibatch(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """What is done for each optimizer step; the rows are those of all ranks."""
        return self.whitened(advantages, mask) if self.over == "minibatch" else advantages


@dataclass(frozen=True)
class Estimator:
    """Advantages of a run without a critic."""

    kind: str  # reinforce, or one of GROUP_ESTIMATORS
    gamma: float
    group_size: int  # neighbouring rows answer the same prompt

    def __call__(self, rewards: Tensor, rollout: Rollout, states: Tensor, scores: Tensor) -> Tensor:
        """rewards, states [B,S] -> [B,R]. reinforce: rewards-to-go of each token; else one number per answer, from its summed rewards.

        scores [B]: what an answer without any action is worth to the others' baseline; there is no place to pay it.
        """
        mask = rollout.response_mask
        if self.kind == "reinforce":
            return discounted_returns(rewards, states, self.gamma)[:, :-1].masked_fill(~mask, 0.0)
        groups = torch.arange(len(rewards)) // self.group_size
        totals = torch.where(states.any(dim=1), rewards.masked_fill(~states, 0.0).sum(1), scores)
        return broadcast_sequence(group_advantages(totals, groups, self.kind, lengths=mask.sum(1)), mask)


@dataclass(frozen=True)
class Values:
    """What a critic makes of an experience; all [B,S] but ``advantages`` [B,R]."""

    advantages: Tensor
    returns: Tensor
    mask: Tensor  # bool: the states whose value is trained


@dataclass(frozen=True)
class CriticEstimator:
    """Advantages of a run with a critic: GAE over tokens, or the whole answer as one action (level sequence).

    ``position`` of the one value at level sequence: "prompt_last" is V(prompt); "response_last" is V(prompt, answer), which is no baseline:
    a perfect critic of that kind gives zero advantages.
    """

    level: str
    gamma: float
    lam: float
    lam_critic: float | None
    bootstrap_truncated: bool
    position: str  # token | prompt_last | response_last
    place: ScorePosition

    def __call__(self, rewards: Tensor, values: Tensor, rollout: Rollout) -> Values:
        """rewards, values [B,S]."""
        states = self.place.states(rollout)
        if self.level == "sequence":
            return self._one_step(rewards.masked_fill(~states, 0.0).sum(1), values, rollout)
        ends = values.gather(1, rollout.response_lengths[:, None])[:, 0]  # V after the last token
        bootstrap = ends.masked_fill(rollout.finished, 0.0) if self.bootstrap_truncated else None
        advantages, returns = compute_gae(
            rewards, values, states, self.gamma, self.lam, bootstrap, self.lam_critic
        )
        return Values(
            advantages[:, :-1].masked_fill(~rollout.response_mask, 0.0), returns, self.place.trained(rollout)
        )

    def _one_step(self, totals: Tensor, values: Tensor, rollout: Rollout) -> Values:
        mask = rollout.response_mask
        column = (
            torch.zeros(len(mask), dtype=torch.long)
            if self.position == "prompt_last"
            else rollout.response_lengths
        )
        chosen = (torch.arange(values.shape[1]) == column[:, None]) & mask.any(dim=1, keepdim=True)
        advantages = totals - values.masked_fill(~chosen, 0.0).sum(1)
        return Values(broadcast_sequence(advantages, mask), broadcast_sequence(totals, chosen), chosen)
