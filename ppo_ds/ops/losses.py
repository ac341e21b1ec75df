"""Policy, value, entropy and KL losses, and their aggregation over everything that one optimizer step sees.

Gradients flow into the policy's log-probs (or the values, or the entropy) only. A micro-batch without a single action gives a loss
of 0 with zero gradients, not NaN: its rank must still run the backward that the others run.

Metrics of a loss are detached *local sums*, which add up exactly over micro-batches and ranks, told apart by their shape:
    [2]     (sum, count): a mean once summed
    [5]     moments, of which explained_variance() makes the number once they are summed
    0-dim   a maximum
All are float64, so that their sums are exact enough whatever the order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.ops.kl import KLEstimator, approx_kl
from ppo_ds.ops.masked import Reduce, keep, masked_mean, masked_sum

LossAgg = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"]
Ratio = Literal["token", "sequence", "sequence_mean"]
PolicyKind = Literal["ppo", "gspo", "cispo", "reinforce"]
ISWeights = Literal["tis", "icepop", "seq_mask_tis"]


@dataclass
class BatchTotals:
    """What one optimizer step sees over all ranks and micro-batches. ``norm``: the divisor of "token_sum_norm", any constant."""

    tokens: float
    sequences: float  # that have at least one token
    dp_size: int = 1
    norm: float | None = None


def batch_totals(
    masks: Iterable[Tensor], reduce: Reduce | None = None, dp_size: int = 1, norm: float | None = None
) -> BatchTotals:
    """Count this rank's masks [B,T] of one optimizer step and add up over ranks."""
    counts = torch.stack([torch.stack([_count(mask), _rows(mask).sum()]).double() for mask in masks]).sum(
        dim=0
    )
    tokens, sequences = (reduce(counts) if reduce else counts).tolist()
    return BatchTotals(tokens, sequences, dp_size, norm)


def aggregate(
    loss: Tensor, mask: Tensor, mode: LossAgg = "token_mean", totals: BatchTotals | None = None
) -> Tensor:
    """loss [B,T] -> 0-dim.

    token_mean           sum / tokens
    seq_mean_token_mean  sum over sequences of their token means / sequences
    seq_mean_token_sum   sum / sequences
    token_sum_norm       sum / norm (the width T without totals)

    Without ``totals``: of this batch. With: this micro-batch's part of the whole optimizer step, times dp_size, since data-parallel
    training averages gradients over ranks. Summed over micro-batches and averaged over ranks it is the mean over everything,
    however the rows were split (for DeepSpeed: ``engine.backward(loss, scale_wrt_gas=False)``). Sequences without tokens count 0.
    """
    total = _numerator(loss, mask, mode)
    if totals is None:
        return total / _weight(mask, mode, None).clamp(min=1)
    divisor = _divisor(mode, totals)
    return total * (totals.dp_size / divisor if divisor > 0 else 0.0)


def _count(mask: Tensor) -> Tensor:
    return mask.bool().sum()


def _rows(mask: Tensor) -> Tensor:
    return mask.bool().any(dim=-1)


def _numerator(loss: Tensor, mask: Tensor, mode: LossAgg) -> Tensor:
    if mode == "seq_mean_token_mean":
        return masked_mean(
            loss, mask, dim=-1, eps=1e-8
        ).sum()  # OpenRLHF's and verl's eps: nothing in float32, the same digits in float64
    return masked_sum(loss, mask)


def _divisor(mode: LossAgg, totals: BatchTotals) -> float:
    match mode:
        case "token_mean":
            return totals.tokens
        case "seq_mean_token_mean" | "seq_mean_token_sum":
            return totals.sequences
        case "token_sum_norm":
            assert totals.norm is not None, (
                "token_sum_norm needs BatchTotals.norm: a micro-batch's own width depends on the split"
            )
            return totals.norm
    raise _unknown(mode)


def _weight(mask: Tensor, mode: LossAgg, totals: BatchTotals | None) -> Tensor:
    """This batch's share of the divisor, 0-dim: shares of micro-batches and ranks add up to the whole divisor."""
    match mode:
        case "token_mean":
            return _count(mask)
        case "seq_mean_token_mean" | "seq_mean_token_sum":
            return _rows(mask).sum()
        case "token_sum_norm" if totals is None:
            return torch.full_like(_count(mask), mask.shape[-1])
        case "token_sum_norm":
            return _count(mask).double() * (_divisor(mode, totals) / max(totals.tokens, 1.0))
    raise _unknown(mode)


def _unknown(mode: str) -> ValueError:
    return ValueError(
        f"unknown aggregation {mode!r}: token_mean, seq_mean_token_mean, seq_mean_token_sum or token_sum_norm"
    )


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    kind: PolicyKind = "ppo",
    log_ratio_clamp: float = 20.0,
    is_weights: Tensor | None = None,
    agg: LossAgg = "token_mean",
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy objective to be minimised: logprobs, old_logprobs, mask [B,T], advantages [B,T] or [B] -> 0-dim, metrics.

    ppo        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017); clip_high None: clip_low. ``dual_clip``
               c > 1 bounds it by -A c where A < 0 (Ye et al. 2020).
    gspo       the same with ratio="sequence_mean" (Zheng et al. 2025)
    cispo      -A clip(r).detach() log pi (MiniMax 2025)
    reinforce  -A log pi, without a ratio

    ratio: of each token, or one for all tokens of an answer: exp of the sum ("sequence") or of the mean ("sequence_mean") of the
    log-ratios. The log-ratio is masked, then clamped to +-log_ratio_clamp (gradient 0 beyond), then exponentiated: without the clamp
    float32 gives 0 * inf = NaN gradients where the loss itself is finite.
    is_weights [B,T]: importance weights of the sampling engine, see rollout_is_weights.

    Metrics, (sum, count) each, see the module's docstring: policy/loss as aggregated by ``agg``; over tokens policy/clipfrac (where
    the clip takes the gradient away), policy/clipfrac_low (the dual clip does), policy/approx_kl (k3 of old || new, with the clamped
    log-ratio), policy/kl_k1 (old - new, per token and unclamped), policy/ratio_mean. 0-dim: policy/ratio_max.
    """
    current, old = keep(logprobs, mask), keep(old_logprobs.detach(), mask)
    advantages = keep((advantages if advantages.dim() == 2 else advantages[:, None]).detach(), mask)
    differences = current - old
    log_ratio = _log_ratio(differences, mask, "sequence_mean" if kind == "gspo" else ratio, log_ratio_clamp)
    r = log_ratio.exp()
    bounds = (1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    never = torch.zeros_like(mask, dtype=torch.bool)
    match kind:
        case "ppo" | "gspo":
            loss, clipped, clipped_low = _clipped_objective(r, advantages, bounds, dual_clip)
        case "cispo":
            truncated = r.detach().clamp(*bounds)
            loss, clipped, clipped_low = -advantages * truncated * current, truncated != r, never
        case "reinforce":
            loss, clipped, clipped_low = -advantages * current, never, never
        case _:
            raise ValueError(f"unknown policy loss {kind!r}: ppo, gspo, cispo or reinforce")
    if is_weights is not None:
        loss = loss * keep(is_weights.detach(), mask)
    old_to_new = approx_kl(
        -log_ratio.detach(), torch.zeros_like(log_ratio), "k3"
    )  # samples of old: d = log old - log new
    metrics = {
        "policy/loss": _part(loss, mask, agg, totals),
        "policy/clipfrac": _mean_parts(clipped, mask),
        "policy/clipfrac_low": _mean_parts(clipped_low, mask),
        "policy/approx_kl": _mean_parts(old_to_new, mask),
        "policy/kl_k1": _mean_parts(-differences, mask),
        "policy/ratio_mean": _mean_parts(r, mask),
        "policy/ratio_max": keep(r.detach(), mask).max().double(),
    }
    return aggregate(loss, mask, agg, totals), metrics


def _log_ratio(differences: Tensor, mask: Tensor, ratio: Ratio, clamp: float) -> Tensor:
    """[B,T] masked log pi - log pi_old -> the clamped log-ratio of each token, [B,T]."""
    match ratio:
        case "token":
            log_ratio = differences
        case "sequence":
            log_ratio = differences.sum(dim=1, keepdim=True)
        case "sequence_mean":
            log_ratio = masked_mean(differences, mask, dim=1)[:, None]
        case _:
            raise ValueError(f"unknown ratio {ratio!r}: token, sequence or sequence_mean")
    return log_ratio.clamp(-clamp, clamp).expand_as(differences)


def _clipped_objective(
    r: Tensor, advantages: Tensor, bounds: tuple[float, float], dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic objective per token, and where either clip binds."""
    plain, bounded = -advantages * r, -advantages * r.clamp(*bounds)
    loss = torch.maximum(plain, bounded)
    clipped_low = torch.zeros_like(r, dtype=torch.bool)
    if dual_clip is not None:
        assert dual_clip > 1, f"dual_clip must be above 1, not {dual_clip}"
        ceiling = -advantages * dual_clip
        clipped_low = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_low, ceiling, loss)
    return loss, bounded > plain, clipped_low


@torch.no_grad()
def rollout_is_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: ISWeights, low: float, high: float
) -> Tensor:
    """Weights [B,T] that correct for a sampling engine whose log-probs differ from the training engine's; 0 where mask = 0.

    With w = exp(old - rollout) per token:  tis: w limited to [low, high].  icepop: w where it lies in [low, high], else 0.
    seq_mask_tis: w, but 0 for answers whose geometric mean of w lies outside [low, high].
    """
    log_weights = keep(old_logprobs, mask) - keep(rollout_logprobs, mask)
    weights = log_weights.clamp(-20.0, 20.0).exp()
    match kind:
        case "tis":
            weights = weights.clamp(low, high)
        case "icepop":
            weights = torch.where((weights >= low) & (weights <= high), weights, 0.0)
        case "seq_mask_tis":
            mean = masked_mean(log_weights, mask, dim=1).exp()[:, None]
            weights = torch.where((mean >= low) & (mean <= high), weights, 0.0)
        case _:
            raise ValueError(f"unknown importance weights {kind!r}: tis, icepop or seq_mask_tis")
    return keep(weights, mask)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    half: bool = True,
    agg: LossAgg = "token_mean",
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the values, all [B,T] -> 0-dim, metrics. ``half``: times 1/2.

    ``clip``: the larger of the errors of V and of V limited to old_values +- clip, clipped in float32 or wider; None: plain.

    Metrics, see the module's docstring: value/loss, value/clipfrac, value/mean (of values) are (sum, count), value/explained_var is
    the moments that explained_variance() takes.
    """
    values, old, returns = keep(values, mask), keep(old_values.detach(), mask), keep(returns.detach(), mask)
    loss = (values - returns).square()
    clipped = torch.zeros_like(mask, dtype=torch.bool)
    if clip is not None:
        bounded = (torch.clamp(values, old - clip, old + clip) - returns).square()
        clipped = bounded > loss
        loss = torch.maximum(loss, bounded)
    loss = loss / 2 if half else loss
    metrics = {
        "value/loss": _part(loss, mask, agg, totals),
        "value/clipfrac": _mean_parts(clipped, mask),
        "value/explained_var": _explained_variance_parts(values.detach(), returns, mask),
        "value/mean": _mean_parts(values, mask),
    }
    return aggregate(loss, mask, agg, totals), metrics


def entropy_loss(
    entropy: Tensor, mask: Tensor, agg: LossAgg = "token_mean", totals: BatchTotals | None = None
) -> Tensor:
    """The mean entropy [B,T] -> 0-dim; a bonus is subtracted by the caller: loss - coef * entropy_loss."""
    return aggregate(entropy, mask, agg, totals)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: KLEstimator = "k2",
    agg: LossAgg = "token_mean",
    totals: BatchTotals | None = None,
) -> Tensor:
    """KL(policy || reference) as a loss, [B,T] -> 0-dim. On fresh samples k2 is the estimator with the right gradient: see approx_kl."""
    return aggregate(approx_kl(keep(logprobs, mask), keep(ref_logprobs, mask), estimator), mask, agg, totals)


def explained_variance(moments: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) of summed "value/explained_var" moments; 0 where the returns do not vary."""
    count, returns, returns_squared, errors, errors_squared = moments.tolist()
    variance = count * returns_squared - returns**2  # times count^2, as the errors' is
    return 1 - (count * errors_squared - errors**2) / variance if variance > 0 else 0.0


def _mean_parts(x: Tensor, mask: Tensor) -> Tensor:
    """[2]: sum over tokens, tokens."""
    return torch.stack([masked_sum(x.detach().double(), mask), _count(mask).double()])


def _part(loss: Tensor, mask: Tensor, agg: LossAgg, totals: BatchTotals | None) -> Tensor:
    """[2]: numerator and share of the divisor of the aggregated loss."""
    return torch.stack([_numerator(loss.detach().double(), mask, agg), _weight(mask, agg, totals).double()])


def _explained_variance_parts(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """[5]: count, sum of returns, of their squares, sum of errors (returns - values), of their squares."""
    returns = returns.double()
    errors = keep(returns - values, mask)
    return torch.stack(
        [_count(mask).double(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
    )
