"""Losses of policies, values and reward models, and their aggregation over a whole optimizer step.

Gradients flow into the policy's log-probs (or the values, or the entropy) only. A micro-batch without any
action has a loss of 0 with zero gradients, not NaN: its rank must still run the same backward as the other
ranks.

Metrics of a loss are detached *local sums* that add up exactly over micro-batches and ranks. Their shape
determines how they are reduced:
    [2]     (sum, count), a mean after summation
    [5]     moments, the input of explained_variance() after summation
    0-dim   a maximum
All are float64, so that the order of summation does not matter in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ppo_ds.ops.kl import KLEstimator, approx_kl
from ppo_ds.ops.logprobs import sequence_logprobs
from ppo_ds.ops.masked import Reduce, keep, masked_mean, masked_sum

LossAgg = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"]
Ratio = Literal["token", "sequence", "sequence_mean"]
PolicyKind = Literal["ppo", "gspo", "cispo", "reinforce"]
ISWeights = Literal["tis", "icepop", "seq_mask_tis", "truncate", "mask"]


@dataclass
class BatchTotals:
    """Counts of one optimizer step over all ranks and micro-batches.

    ``norm`` is the constant divisor of the aggregation "token_sum_norm".
    """

    tokens: float
    sequences: float  # sequences with at least one token
    dp_size: int = 1
    norm: float | None = None
    positive_tokens: float = 0.0  # tokens of the correct responses, for algo.positive_nll


def batch_totals(
    masks: Iterable[Tensor], reduce: Reduce | None = None, dp_size: int = 1, norm: float | None = None
) -> BatchTotals:
    """Counts the tokens and sequences of one optimizer step from each rank's masks [B,T], over all ranks."""
    counts = torch.stack([torch.stack([_count(mask), _rows(mask).sum()]).double() for mask in masks]).sum(
        dim=0
    )
    tokens, sequences = (reduce(counts) if reduce else counts).tolist()
    return BatchTotals(tokens, sequences, dp_size, norm)


class Share(NamedTuple):
    """The contribution of one micro-batch to an aggregated loss."""

    total: Tensor  # 0-dim: the micro-batch's part of the numerator
    weight: Tensor  # 0-dim: the micro-batch's part of the divisor; adds up over micro-batches and ranks
    divisor: float | None  # the divisor of the whole optimizer step; None without totals


def token_mean(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over all tokens by their number."""
    return Share(masked_sum(loss, mask), _count(mask), totals.tokens if totals else None)


def seq_mean_token_mean(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over sequences of their token means by the number of sequences."""
    # the eps of OpenRLHF and verl, for equal results in float64; it has no effect in float32
    total = masked_mean(loss, mask, dim=-1, eps=1e-8).sum()
    return Share(total, _rows(mask).sum(), totals.sequences if totals else None)


def seq_mean_token_sum(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over all tokens by the number of sequences."""
    return Share(masked_sum(loss, mask), _rows(mask).sum(), totals.sequences if totals else None)


def token_sum_norm(loss: Tensor, mask: Tensor, totals: BatchTotals | None) -> Share:
    """Divides the sum over all tokens by ``totals.norm``, or by the width T without totals."""
    total, count = masked_sum(loss, mask), _count(mask)
    if totals is None:
        return Share(total, torch.full_like(count, mask.shape[-1]), None)
    assert totals.norm is not None, (
        "token_sum_norm needs BatchTotals.norm: the width of a micro-batch depends on the split"
    )
    return Share(total, count.double() * (totals.norm / max(totals.tokens, 1.0)), totals.norm)


Aggregation = Callable[[Tensor, Tensor, BatchTotals | None], Share]
AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "token_sum_norm": token_sum_norm,
}


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: LossAgg | Aggregation = "token_mean",
    totals: BatchTotals | None = None,
) -> Tensor:
    """Aggregates a per-token loss [B,T] to a scalar.

    token_mean           sum / tokens
    seq_mean_token_mean  sum over sequences of their token means / sequences
    seq_mean_token_sum   sum / sequences
    token_sum_norm       sum / norm (the width T without totals)

    Sequences without tokens do not count.

    Args:
        mode: One of these names, or a function like those of AGGREGATIONS.
        totals: None aggregates over this batch only. With totals, the result is this micro-batch's share of
            the whole optimizer step, times dp_size, since data-parallel training averages gradients over
            ranks. Summed over micro-batches and averaged over ranks it is the mean over the whole step, for
            any split of the rows (with DeepSpeed: ``engine.backward(loss, scale_wrt_gas=False)``).
    """
    share = _share(loss, mask, mode, totals)
    if totals is None or share.divisor is None:
        return share.total / share.weight.clamp(min=1)
    return share.total * (totals.dp_size / share.divisor if share.divisor > 0 else 0.0)


def _share(loss: Tensor, mask: Tensor, mode: LossAgg | Aggregation, totals: BatchTotals | None) -> Share:
    if callable(mode):
        return mode(loss, mask, totals)
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}: {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[mode](loss, mask, totals)


def _count(mask: Tensor) -> Tensor:
    return mask.bool().sum()


def _rows(mask: Tensor) -> Tensor:
    return mask.bool().any(dim=-1)


class PolicyTerms(NamedTuple):
    """Holds what an objective is computed from. All are [B,T], and 0 outside the mask.

    ``ratio`` is that of the token or of its response, from a clamped log-ratio. ``differences`` is log pi -
    log pi_old of the token, without a clamp. Gradients flow through ``ratio``, ``differences`` and
    ``logprobs``.
    """

    ratio: Tensor
    differences: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


class TokenLoss(NamedTuple):
    """Holds a policy loss per token, and masks of the tokens where a clip applies. All are [B,T]."""

    loss: Tensor
    clipped: Tensor
    clipped_low: Tensor  # clipped by the dual clip


Bounds = tuple[float, float]  # of the ratio


def clipped_objective(terms: PolicyTerms, bounds: Bounds, dual_clip: float | None) -> TokenLoss:
    """Computes PPO's clipped objective."""
    r, advantages = terms.ratio, terms.advantages
    plain, bounded = -advantages * r, -advantages * r.clamp(*bounds)
    loss = torch.maximum(plain, bounded)
    clipped_low = torch.zeros_like(r, dtype=torch.bool)
    if dual_clip is not None:
        assert dual_clip > 1, f"dual_clip must be above 1, not {dual_clip}"
        ceiling = -advantages * dual_clip
        clipped_low = (advantages < 0) & (loss > ceiling)
        loss = torch.where(clipped_low, ceiling, loss)
    return TokenLoss(loss, bounded > plain, clipped_low)


def truncated_objective(terms: PolicyTerms, bounds: Bounds, dual_clip: float | None) -> TokenLoss:
    """Computes CISPO's objective: the clipped ratio is a weight of the log-prob and has no gradient."""
    r = terms.ratio
    truncated = r.detach().clamp(*bounds)
    loss = -terms.advantages * truncated * terms.logprobs
    return TokenLoss(loss, truncated != r, torch.zeros_like(r, dtype=torch.bool))


def plain_objective(terms: PolicyTerms, bounds: Bounds, dual_clip: float | None) -> TokenLoss:
    """Computes REINFORCE's objective, without a ratio."""
    unclipped = torch.zeros_like(terms.ratio, dtype=torch.bool)
    return TokenLoss(-terms.advantages * terms.logprobs, unclipped, unclipped)


@dataclass(frozen=True)
class Objective:
    """A kind of policy loss.

    ``compute`` takes the terms, the bounds of the ratio and the dual clip.
    """

    compute: Callable[[PolicyTerms, Bounds, float | None], TokenLoss]
    ratio: Ratio | None = None  # ratio that this kind requires; None: the caller chooses


OBJECTIVES = {
    "ppo": Objective(clipped_objective),
    "gspo": Objective(clipped_objective, ratio="sequence_mean"),
    "cispo": Objective(truncated_objective),
    "reinforce": Objective(plain_objective),
}


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    kind: PolicyKind = "ppo",
    log_ratio_clamp: float = 20.0,
    is_weights: Tensor | None = None,
    agg: LossAgg | Aggregation = "token_mean",
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the policy loss and its metrics.

    ppo        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) (Schulman et al. 2017)
    gspo       the same with ratio="sequence_mean" (Zheng et al. 2025)
    cispo      -A clip(r).detach() log pi (MiniMax 2025)
    reinforce  -A log pi, without a ratio

    Args:
        logprobs, old_logprobs, mask: [B,T].
        advantages: [B,T] or [B].
        clip_low: None: no lower bound, as with 1, since a ratio is positive.
        clip_high: None uses clip_low.
        dual_clip: A constant c > 1 that bounds the loss by -A c where A < 0 (Ye et al. 2020).
        ratio: One ratio per token, or one for all tokens of a response: exp of the sum ("sequence") or of the
            mean ("sequence_mean") of the log-ratios.
        log_ratio_clamp, is_weights, agg, totals: See surrogate_loss.

    Returns:
        The loss, 0-dim, and its metrics, see surrogate_loss.
    """
    if kind not in OBJECTIVES:
        raise ValueError(f"unknown policy loss {kind!r}: {', '.join(OBJECTIVES)}")
    bounds = ratio_bounds(clip_low, clip_high)
    objective = OBJECTIVES[kind]
    return surrogate_loss(
        lambda terms: objective.compute(terms, bounds, dual_clip),
        logprobs,
        old_logprobs,
        advantages,
        mask,
        ratio=objective.ratio or ratio,
        log_ratio_clamp=log_ratio_clamp,
        is_weights=is_weights,
        agg=agg,
        totals=totals,
    )


def ratio_bounds(clip_low: float | None, clip_high: float | None) -> Bounds:
    """Returns the bounds 1 - clip_low and 1 + clip_high of the ratio, see policy_loss."""
    high = clip_low if clip_high is None else clip_high
    assert high is not None, "clip_high must be set if clip_low is None"
    return 1 - (1.0 if clip_low is None else clip_low), 1 + high


def surrogate_loss(
    objective: Callable[[PolicyTerms], TokenLoss],
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: Ratio = "token",
    log_ratio_clamp: float = 20.0,
    is_weights: Tensor | None = None,
    agg: LossAgg | Aggregation = "token_mean",
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes a policy loss from the objective of a token, and its metrics.

    The log-ratio is masked, then clamped, then exponentiated. Without the clamp float32 gives 0 * inf = NaN
    gradients although the loss is finite.

    Args:
        logprobs, old_logprobs, mask: [B,T].
        advantages: [B,T] or [B].
        ratio: The ratio that the objective gets, see policy_loss.
        log_ratio_clamp: Limits the log-ratio to +-log_ratio_clamp; the gradient is 0 beyond it.
        is_weights: Importance weights [B,T], see rollout_is_weights.

    Returns:
        The loss, 0-dim, and its metrics (see the module's docstring), each (sum, count) over tokens unless
        noted:
            policy/loss          as aggregated by ``agg``
            policy/clipfrac      tokens where the clip applies: it sets their gradient to zero, but in cispo
                                 it limits their weight; in gmpo it applies to the ratio of each token
            policy/clipfrac_low  tokens whose gradient the dual clip sets to zero
            policy/approx_kl     k3 of KL(old || new), with the clamped log-ratio
            policy/kl_k1         log-prob old - new, per token and unclamped
            policy/ratio_mean
            policy/ratio_max     0-dim
    """
    current, old = keep(logprobs, mask), keep(old_logprobs.detach(), mask)
    advantages = keep((advantages if advantages.dim() == 2 else advantages[:, None]).detach(), mask)
    differences = current - old
    log_ratio = clamped_log_ratio(differences, mask, ratio, log_ratio_clamp)
    r = log_ratio.exp()
    loss, clipped, clipped_low = objective(PolicyTerms(r, differences, current, old, advantages, mask))
    if is_weights is not None:
        loss = loss * keep(is_weights.detach(), mask)
    # samples come from the old policy, so d = log old - log new
    old_to_new = approx_kl(-log_ratio.detach(), torch.zeros_like(log_ratio), "k3")
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


def clamped_log_ratio(differences: Tensor, mask: Tensor, ratio: Ratio, clamp: float) -> Tensor:
    """Computes the clamped log-ratio of each token from masked log pi - log pi_old, [B,T] -> [B,T]."""
    match ratio:
        case "token":
            log_ratio = differences
        case "sequence":
            log_ratio = sequence_logprobs(differences, mask)[:, None]
        case "sequence_mean":
            log_ratio = masked_mean(differences, mask, dim=1)[:, None]
        case _:
            raise ValueError(f"unknown ratio {ratio!r}: token, sequence or sequence_mean")
    return log_ratio.clamp(-clamp, clamp).expand_as(differences)


@torch.no_grad()
def rollout_is_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: ISWeights,
    low: float,
    high: float,
    level: Ratio = "token",
) -> Tensor:
    """Computes importance weights [B,T] that correct for the sampling engine's log-probs; 0 where mask = 0.

    With w = exp(old - rollout) per token, and W = w at level "token", the product of a response's w at
    "sequence", their geometric mean at "sequence_mean":

        truncate      W, limited to [low, high]
        mask          W if it lies in [low, high], else 0
        tis           truncate at level "token"
        icepop        mask at level "token"
        seq_mask_tis  w, but 0 for responses whose geometric mean of w lies outside [low, high]
    """
    bounded = bounded_is_ratio(old_logprobs, rollout_logprobs, mask, kind, level)
    match kind:
        case "tis" | "truncate":
            weights = bounded.clamp(low, high)
        case "icepop" | "mask":
            weights = torch.where((bounded >= low) & (bounded <= high), bounded, 0.0)
        case "seq_mask_tis":
            log_weights = keep(old_logprobs, mask) - keep(rollout_logprobs, mask)
            weights = log_weights.clamp(-20.0, 20.0).exp()
            weights = torch.where((bounded >= low) & (bounded <= high), weights, 0.0)
        case _:
            raise ValueError(
                f"unknown importance weights {kind!r}: tis, icepop, seq_mask_tis, truncate or mask"
            )
    return keep(weights, mask)


@torch.no_grad()
def bounded_is_ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: ISWeights, level: Ratio = "token"
) -> Tensor:
    """Computes the ratio [B,T] of each token that rollout_is_weights compares with its bounds."""
    log_weights = keep(old_logprobs, mask) - keep(rollout_logprobs, mask)
    if kind == "seq_mask_tis":
        return masked_mean(log_weights, mask, dim=1).exp()[:, None].expand_as(log_weights)
    has_level = kind in ("truncate", "mask")
    return clamped_log_ratio(log_weights, mask, level if has_level else "token", 20.0).exp()


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    half: bool = True,
    agg: LossAgg | Aggregation = "token_mean",
    totals: BatchTotals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the squared error of the values, a scalar, and its metrics. All inputs are [B,T].

    Args:
        clip: The loss is the larger of the errors of V and of V limited to old_values +- clip, in float32 or
            wider. None: no clipping.
        half: Multiplies the loss by 1/2.

    Returns:
        The loss and metrics, see the module's docstring: value/loss, value/clipfrac and value/mean (of the
        values) are (sum, count); value/explained_var holds the moments for explained_variance().
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
        "value/explained_var": explained_variance_moments(values.detach(), returns, mask),
        "value/mean": _mean_parts(values, mask),
    }
    return aggregate(loss, mask, agg, totals), metrics


def entropy_loss(
    entropy: Tensor,
    mask: Tensor,
    agg: LossAgg | Aggregation = "token_mean",
    totals: BatchTotals | None = None,
) -> Tensor:
    """Aggregates the entropy [B,T] to a scalar.

    For an entropy bonus, the caller subtracts it: loss - coef * entropy_loss.
    """
    return aggregate(entropy, mask, agg, totals)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: KLEstimator | Callable[[Tensor, Tensor], Tensor] = "k2",
    agg: LossAgg | Aggregation = "token_mean",
    totals: BatchTotals | None = None,
) -> Tensor:
    """Aggregates KL(policy || reference) [B,T] to a scalar loss.

    ``estimator`` is the name of an estimator of approx_kl, or a function of log-probs and reference
    log-probs. On samples of the current policy, k2 has the right gradient, see approx_kl.
    """
    estimate = estimator if callable(estimator) else partial(approx_kl, estimator=estimator)
    return aggregate(estimate(keep(logprobs, mask), keep(ref_logprobs, mask)), mask, agg, totals)


def pairwise_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margins: Tensor | None = None,
    centering: float = 0.0,
    label_smoothing: float = 0.0,
    pairs: float | None = None,
    dp_size: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the pairwise logistic loss of a reward model (Bradley and Terry 1952; Ouyang et al. 2022).

    With d = chosen - rejected - margin, the loss of a pair is

        -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d) + centering (c + r)^2

    Args:
        chosen, rejected: Scores c and r of the two texts of each pair, [b].
        margins: [b]; None: no margins (Touvron et al. 2023).
        centering: Keeps the mean of the scores near 0, which the first terms do not determine (Eisenstein et
            al. 2023).
        label_smoothing: Assumed share of pairs whose label is wrong.
        pairs: Number of pairs of the whole optimizer step, over all ranks and micro-batches. None: [b] is the
            whole step. The result is this micro-batch's share of the mean, times ``dp_size``, see
            ``aggregate``.

    Returns:
        The loss, 0-dim, and its metrics, each (sum, count) over pairs: rm/loss, rm/accuracy (a tie counts as
        half a correct pair) and rm/margin_mean (of c - r).
    """
    difference = chosen - rejected
    d = difference if margins is None else difference - margins
    loss = -F.logsigmoid(d)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-d)
    if centering:
        loss = loss + centering * (chosen + rejected).square()
    every = torch.ones_like(d, dtype=torch.bool)
    metrics = {
        "rm/loss": _mean_parts(loss, every),
        "rm/accuracy": _mean_parts(pair_accuracy(difference.detach()), every),
        "rm/margin_mean": _mean_parts(difference, every),
    }
    return loss.sum() * (dp_size / (len(d) if pairs is None else pairs)), metrics


def pair_accuracy(differences: Tensor) -> Tensor:
    """Returns 1 for each pair whose preferred text has the higher score, 0.5 for a tie, and 0 otherwise."""
    return (differences > 0).double() + 0.5 * (differences == 0)


def explained_variance(moments: Tensor) -> float:
    """Computes 1 - Var(returns - values) / Var(returns) from summed "value/explained_var" moments.

    The result is 0 if the returns are constant.
    """
    count, returns, returns_squared, errors, errors_squared = moments.tolist()
    variance = count * returns_squared - returns**2  # times count^2, like the variance of the errors
    return 1 - (count * errors_squared - errors**2) / variance if variance > 0 else 0.0


def _mean_parts(x: Tensor, mask: Tensor) -> Tensor:
    """Returns (sum over tokens, number of tokens), [2]."""
    return torch.stack([masked_sum(x.detach().double(), mask), _count(mask).double()])


def _part(loss: Tensor, mask: Tensor, agg: LossAgg | Aggregation, totals: BatchTotals | None) -> Tensor:
    """Returns (numerator, share of the divisor) of the aggregated loss, [2]."""
    share = _share(loss.detach().double(), mask, agg, totals)
    return torch.stack([share.total, share.weight.double()])


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns the count, and sums of returns, squared returns, errors and squared errors, [5].

    Errors are returns - values.
    """
    returns = returns.double()
    errors = keep(returns - values, mask)
    return torch.stack(
        [_count(mask).double(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
    )
