"""The losses of one micro-batch: what the actor and the critic are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ops.kl import approx_kl
from ppo_ds.ops.losses import BatchTotals, aggregate, entropy_loss, kl_loss, policy_loss, value_loss
from ppo_ds.ops.masked import masked_sum
from ppo_ds.types import Experience, Sequences

Parts = dict[str, Tensor]  # local sums, see ops/losses.py


@dataclass(frozen=True)
class PolicyObjective:
    """Clipped surrogate - entropy_coef * entropy (+ kl_coef * KL where the KL is not in the reward) (+ aux_coef * the experts' balance loss).

    At level sequence an answer is one action: one ratio, one term in each mean, its log-prob and its KL summed over its tokens.
    """

    level: str  # token | sequence
    kind: str
    clip_low: float
    clip_high: float | None
    dual_clip: float | None
    agg: str
    entropy_coef: float
    entropy_kind: str  # exact | sample
    kl_in_loss: bool
    kl_estimator: str
    aux_coef: float

    def __call__(
        self, out: PolicyOutput, micro: Experience, totals: BatchTotals, kl_coef: float
    ) -> tuple[Tensor, Parts]:
        mask, logprobs = micro.response_mask, out.logprobs
        # with one optimizer step for the rollout the old policy is the one that is about to learn: its ratio is 1, and has a gradient
        old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
        whole = self.level == "sequence"
        per_answer = "seq_mean_token_sum" if whole else self.agg
        loss, seen = policy_loss(
            logprobs,
            old,
            micro.advantages,
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            ratio="sequence" if whole else "token",
            kind=self.kind,
            is_weights=micro.weights,
            # PPO's term is the whole answer's on each of its tokens; the others' have the token's own log-prob in them, and add up
            agg="seq_mean_token_mean" if whole and self.kind == "ppo" else per_answer,
            totals=totals,
        )
        entropy = out.entropy if self.entropy_kind == "exact" else -logprobs
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy_loss(entropy, mask, agg=per_answer, totals=totals)
        if self.kl_in_loss:
            if kl_coef:  # else 0 times a KL that is not finite
                loss = loss + kl_coef * kl_loss(
                    logprobs,
                    micro.ref_logprobs,
                    mask,
                    estimator=self.kl_estimator,
                    agg=per_answer,
                    totals=totals,
                )
            seen["policy/kl_loss"] = token_sum(
                approx_kl(logprobs, micro.ref_logprobs, self.kl_estimator), mask
            )
        if self.aux_coef:
            # a mean over the tokens of this forward: its share in the mean over the optimizer step
            tokens = mask.sum()
            loss = loss + self.aux_coef * out.aux * (tokens * (totals.dp_size / max(totals.tokens, 1.0)))
            seen["policy/aux_loss"] = torch.stack([out.aux.detach() * tokens, tokens])
        seen["policy/entropy"] = token_sum(entropy, mask)
        return loss, seen


@dataclass(frozen=True)
class ValueObjective:
    """coef * (1/2 if half) * squared error, clipped around the old value. At level sequence one value per answer."""

    clip: float | None
    half: bool
    coef: float
    agg: str

    def __call__(self, values: Tensor, micro: Experience, totals: BatchTotals) -> tuple[Tensor, Parts]:
        """values [b,S]."""
        loss, seen = value_loss(
            values,
            micro.values,
            micro.returns,
            micro.value_mask,
            clip=self.clip,
            half=self.half,
            agg=self.agg,
            totals=totals,
        )
        return self.coef * loss, seen


@dataclass(frozen=True)
class PtxObjective:
    """The language-modelling loss on other texts (Ouyang et al. 2022): coef * mean over their tokens of -log p."""

    coef: float

    def __call__(self, out: PolicyOutput, micro: Sequences, totals: BatchTotals) -> tuple[Tensor, Parts]:
        loss = aggregate(-out.logprobs, micro.response_mask, totals=totals)
        return self.coef * loss, {"policy/ptx_loss": token_sum(-out.logprobs, micro.response_mask)}


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    """[2]: sum over tokens, tokens; a mean once it is added up over micro-batches and ranks."""
    return torch.stack([masked_sum(x.detach(), mask), mask.sum()])
