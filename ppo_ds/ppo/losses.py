"""Losses of the actor and the critic on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_ds.algorithm.aggregation import (
    Aggregation,
    BatchTotals,
    aggregate,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from ppo_ds.algorithm.policy.keys import PolicyConfig
from ppo_ds.algorithm.policy.selection import off_policy_tokens, top_entropy_tokens
from ppo_ds.algorithm.policy.surrogate import PolicyLoss, surrogate_loss
from ppo_ds.algorithm.value.loss import value_loss
from ppo_ds.config.sections.algo import EntropyConfig, PositiveNLLConfig, ValueConfig
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ops.masked import keep, sum_and_count
from ppo_ds.types import Experience, Sequences

Parts = dict[str, Tensor]  # metrics of a micro-batch as local sums, see algorithm/aggregation.py


@dataclass(frozen=True)
class PolicyObjective:
    """Computes the actor's loss on a micro-batch.

        policy loss - coef * entropy (+ kl_coef * KL to the reference) (+ aux_coef * load-balancing loss)
            (+ coef * mean of -log p over the tokens of the correct responses)

    At action level sequence a response is one action: it has one ratio and is one term of each mean, and its
    log-prob and its KL are summed over its tokens.
    """

    loss: PolicyLoss
    policy: PolicyConfig  # its keys
    ratio: str  # unit of the ratio: that of ``loss``, or ``level``
    # for action level sequence: False if ``loss`` gives every token the loss of its whole response
    sums_over_tokens: bool
    entropy: EntropyConfig
    kl: Callable[[Tensor, Tensor], Tensor] | None  # estimator of the KL in the loss; None: no KL there
    positive_nll: PositiveNLLConfig
    aux_coef: float
    agg: Aggregation  # an entry of LOSS_AGGREGATIONS
    level: str  # token | sequence
    off_policy_limit: float | None = None  # see off_policy_tokens; None: no response leaves the loss

    @property
    def forward_options(self) -> dict[str, bool]:
        """Options of the actor's forward that give the outputs which the loss needs."""
        return {
            "with_entropy": self.entropy.kind == "exact",
            "with_aux": self.aux_coef > 0,
            "entropy_gradient": self.entropy.coef > 0,
        }

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor, Parts]:
        """Returns the micro-batch's part of the loss of the optimizer step, and its metrics."""
        mask, logprobs = micro.response_mask, out.logprobs
        # with one optimizer step per rollout the old policy is the current one: the ratio is 1, but it has a
        # gradient
        old_logprobs = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        sequence = self.level == "sequence"
        agg = seq_mean_token_sum if sequence else self.agg
        weights, off_policy = micro.weights, None
        if self.off_policy_limit is not None:
            off_policy = off_policy_tokens(
                logprobs, micro.decode_logprobs, micro.advantages, mask, self.off_policy_limit
            )
            weights = weights.masked_fill(off_policy, 0.0)
        loss, parts = surrogate_loss(
            self.loss,
            self.policy,
            logprobs,
            old_logprobs,
            micro.advantages,
            mask,
            ratio=self.ratio,
            is_weights=weights,
            agg=seq_mean_token_mean if sequence and not self.sums_over_tokens else agg,
            totals=totals,
            selected=micro.selected,
        )
        if off_policy is not None:
            parts["policy/off_policy_frac"] = sum_and_count(off_policy.float(), mask)
        entropy = out.entropy if self.entropy.kind == "exact" else -logprobs
        if self.entropy.coef:
            loss = loss - self.entropy.coef * aggregate(entropy, mask, agg, totals)
        if self.kl is not None:
            if kl_coef:  # 0 times a non-finite KL would be NaN
                kl = self.kl(keep(logprobs, mask), keep(micro.ref_logprobs, mask))
                loss = loss + kl_coef * aggregate(kl, mask, agg, totals)
            parts["policy/kl_loss"] = sum_and_count(self.kl(logprobs, micro.ref_logprobs), mask)
        if self.aux_coef:
            # ``out.aux`` is a mean over the tokens of this forward, so it is weighted by their share of the
            # tokens of the optimizer step
            tokens = mask.sum()
            loss = loss + self.aux_coef * out.aux * (tokens * (totals.dp_size / max(totals.tokens, 1.0)))
            parts["policy/aux_loss"] = torch.stack([out.aux.detach() * tokens, tokens])
        if self.positive_nll.coef:
            positive = correct_tokens(micro, self.positive_nll.above)
            step = replace(totals, tokens=totals.positive_tokens)
            loss = loss + self.positive_nll.coef * aggregate(-logprobs, positive, token_mean, step)
            parts["policy/positive_nll"] = sum_and_count(-logprobs, positive)
        parts["policy/entropy"] = sum_and_count(entropy, mask)
        return loss, parts


def correct_tokens(rows: Experience, above: float) -> Tensor:
    """Returns the mask [B,R] of the actions in responses whose score is above ``above``."""
    return rows.response_mask & (rows.scores > above)[:, None]


def select_tokens(
    minibatch: Experience,
    generator: torch.Generator,
    *,
    top_entropy: float | None,
    selection: Callable[..., Tensor] | None,
) -> Experience:
    """Selects tokens of one optimizer step, which ``minibatch`` holds for all ranks.

    Args:
        generator: Must have the same state on every rank.
        top_entropy: Share of the tokens that keep their policy loss, those with the highest entropy before
            the update. The other tokens still count in the divisor of the mean (Wang et al. 2025). None: all.
        selection: Selects the tokens for the column ``selected``. None: the policy loss needs none.
    """
    mask = minibatch.response_mask
    if top_entropy is not None:
        kept = top_entropy_tokens(minibatch.entropy, mask, top_entropy)
        minibatch = replace(minibatch, weights=minibatch.weights.masked_fill(~kept, 0.0))
    if selection is not None:
        selected = selection(minibatch.logprobs, minibatch.advantages, mask, generator)
        minibatch = replace(minibatch, selected=selected)
    return minibatch


@dataclass(frozen=True)
class ValueObjective:
    """Computes the critic's loss: coef * (1/2 if half) * squared error, clipped around the old value.

    At action level sequence there is one value per response.
    """

    value: ValueConfig
    agg: Aggregation  # an entry of LOSS_AGGREGATIONS

    def __call__(self, values: Tensor, micro: Experience, totals: BatchTotals) -> tuple[Tensor, Parts]:
        """Returns the loss of ``values`` [b,S], and its metrics."""
        loss, parts = value_loss(
            values,
            micro.values,
            micro.returns,
            micro.value_mask,
            clip=self.value.clip,
            half=self.value.half,
            agg=self.agg,
            totals=totals,
        )
        return self.value.coef * loss, parts


@dataclass(frozen=True)
class PtxObjective:
    """Computes coef * mean of -log p over the tokens of the PTX texts (PPO-ptx, Ouyang et al. 2022)."""

    coef: float

    def __call__(self, out: PolicyOutput, micro: Sequences, totals: BatchTotals) -> tuple[Tensor, Parts]:
        loss = aggregate(-out.logprobs, micro.response_mask, token_mean, totals)
        return self.coef * loss, {"policy/ptx_loss": sum_and_count(-out.logprobs, micro.response_mask)}
