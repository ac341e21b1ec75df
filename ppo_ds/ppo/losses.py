"""Losses of the actor and the critic on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ppo_ds.algorithm.loss.aggregation import Aggregation, BatchTotals, aggregate, token_mean
from ppo_ds.algorithm.policy.keys import PolicyConfig
from ppo_ds.algorithm.policy.selection import off_policy_tokens
from ppo_ds.algorithm.policy.surrogate import PolicyLoss, surrogate_loss
from ppo_ds.algorithm.value.loss import value_loss
from ppo_ds.config.sections.algo import EntropyConfig, ValueConfig
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ops.masked import keep, sum_and_count
from ppo_ds.types import Experience, Sequences

Parts = dict[str, Tensor]  # metrics of a micro-batch as local sums, see algorithm/loss/aggregation.py


class Term(Protocol):
    """A summand of the actor's loss.

    At action level sequence, the KL and the entropy of a response are sums over its tokens.
    """

    @property
    def forward_options(self) -> Mapping[str, bool]:
        """Options of the actor's forward that make it return the outputs that the term needs."""
        return {}

    def counted(self, minibatch: Experience, totals: BatchTotals) -> BatchTotals:
        """Returns ``totals`` with the term's own counts over all rows of an optimizer step, if it has any."""
        return totals

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor | None, Parts]:
        """Returns the micro-batch's part of the optimizer step's loss (None: no loss), and its metrics."""


def actor_loss(
    terms: Iterable[Term], out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
) -> tuple[Tensor, Parts]:
    """Returns the sum of the terms' losses on a micro-batch, and the metrics of all terms."""
    results = [term(out, micro, totals, kl_coef) for term in terms]
    losses = [loss for loss, _ in results if loss is not None]
    return sum(losses[1:], losses[0]), {name: part for _, parts in results for name, part in parts.items()}


def forward_options(terms: Iterable[Term]) -> dict[str, bool]:
    """Returns the merged forward options of ``terms``."""
    return {name: value for term in terms for name, value in term.forward_options.items()}


@dataclass(frozen=True)
class PolicyTerm(Term):
    """The policy loss, see algorithm/policy."""

    loss: PolicyLoss
    policy: PolicyConfig  # its keys
    ratio: str  # unit of the ratio: token, sequence or sequence_mean
    agg: Aggregation

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor, Parts]:
        mask, weights, parts = micro.response_mask, micro.weights, {}
        # with one optimizer step per rollout, the old policy is the current policy: the ratio is 1, but has a
        # gradient
        old_logprobs = out.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        if self.policy.off_policy_limit is not None:
            off_policy = off_policy_tokens(
                out.logprobs, micro.decode_logprobs, micro.advantages, mask, self.policy.off_policy_limit
            )
            weights = weights.masked_fill(off_policy, 0.0)
            parts["policy/off_policy_frac"] = sum_and_count(off_policy.float(), mask)
        loss, metrics = surrogate_loss(
            self.loss,
            self.policy,
            out.logprobs,
            old_logprobs,
            micro.advantages,
            mask,
            ratio=self.ratio,
            is_weights=weights,
            agg=self.agg,
            totals=totals,
            selected=micro.selected,
        )
        return loss, metrics | parts


@dataclass(frozen=True)
class EntropyTerm(Term):
    """Subtracts coef * entropy, either exact or estimated as -log p of the sampled tokens."""

    entropy: EntropyConfig
    agg: Aggregation

    @property
    def forward_options(self) -> dict[str, bool]:
        return {"with_entropy": self.entropy.kind == "exact", "entropy_gradient": self.entropy.coef > 0}

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor | None, Parts]:
        entropy = out.entropy if self.entropy.kind == "exact" else -out.logprobs
        parts = {"policy/entropy": sum_and_count(entropy, micro.response_mask)}
        if not self.entropy.coef:
            return None, parts
        return -self.entropy.coef * aggregate(entropy, micro.response_mask, self.agg, totals), parts


@dataclass(frozen=True)
class ReferenceKLTerm(Term):
    """Adds coefficient * KL to the reference (`algo.kl.place=loss`)."""

    kl: Callable[[Tensor, Tensor], Tensor]  # its estimator
    agg: Aggregation

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor | None, Parts]:
        mask, ref_logprobs = micro.response_mask, micro.ref_logprobs
        parts = {"policy/kl_loss": sum_and_count(self.kl(out.logprobs, ref_logprobs), mask)}
        if not kl_coef:  # 0 times a non-finite KL would be NaN
            return None, parts
        kl = self.kl(keep(out.logprobs, mask), keep(ref_logprobs, mask))
        return kl_coef * aggregate(kl, mask, self.agg, totals), parts


@dataclass(frozen=True)
class LoadBalancingTerm(Term):
    """Adds coefficient * load-balancing loss of a mixture of experts."""

    coef: float
    forward_options = {"with_aux": True}

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor, Parts]:
        assert out.aux is not None, "see forward_options"
        # ``out.aux`` is a mean over the tokens of this forward, so it is weighted by their share of the
        # tokens of the optimizer step
        tokens = micro.response_mask.sum()
        loss = self.coef * out.aux * (tokens * (totals.dp_size / max(totals.tokens, 1.0)))
        return loss, {"policy/aux_loss": torch.stack([out.aux.detach() * tokens, tokens])}


@dataclass(frozen=True)
class PositiveNLLTerm(Term):
    """Adds coef * mean of -log p over the tokens of responses with a score above ``above`` (VAPO)."""

    coef: float
    above: float

    def counted(self, minibatch: Experience, totals: BatchTotals) -> BatchTotals:
        return replace(totals, positive_tokens=float(self.correct_tokens(minibatch).sum()))

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor, Parts]:
        correct = self.correct_tokens(micro)
        step = replace(totals, tokens=totals.positive_tokens)
        loss = self.coef * aggregate(-out.logprobs, correct, token_mean, step)
        return loss, {"policy/positive_nll": sum_and_count(-out.logprobs, correct)}

    def correct_tokens(self, rows: Experience) -> Tensor:
        """Returns the mask [B,R] of the actions in responses with a score above ``above``."""
        return rows.response_mask & (rows.scores > self.above)[:, None]


@dataclass(frozen=True)
class ValueObjective:
    """Computes the value loss (algorithm/value/loss.py) with the keys coef, clip and half of algo.value."""

    value: ValueConfig
    agg: Aggregation

    def __call__(self, values: Tensor, micro: Experience, totals: BatchTotals) -> tuple[Tensor, Parts]:
        """Returns the loss of ``values`` [b,S] and its metrics."""
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
    texts: Iterator[Sequences]  # yields the texts of one optimizer step, for all ranks

    def __call__(self, out: PolicyOutput, micro: Sequences, totals: BatchTotals) -> tuple[Tensor, Parts]:
        loss = aggregate(-out.logprobs, micro.response_mask, token_mean, totals)
        return self.coef * loss, {"policy/ptx_loss": sum_and_count(-out.logprobs, micro.response_mask)}
