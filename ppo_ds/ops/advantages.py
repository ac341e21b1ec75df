"""Advantage estimators.

B sequences, T response positions. All results are detached and are 0 where mask = 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ppo_ds.ops.masked import Reduce, keep, masked_mean_var, masked_whiten, widen
from ppo_ds.ops.rewards import token_rewards

GroupBaseline = Literal["rloo", "grpo", "dr_grpo", "lite_ppo", "maxrl", "mean", "opo", "none"]


@torch.no_grad()
def compute_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap_value: Tensor | None = None,
    lam_critic: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes generalised advantage estimates (Schulman et al. 2016) and returns, [B,T] each.

        delta_t = r_t + gamma * V_{t+1} - V_t      A_t = delta_t + gamma * lam * A_{t+1}      returns = A + V

    Position t + 1 is the next position with mask = 1: holes (tool output, another speaker's turn) are skipped
    without decay. After the last position V is ``bootstrap_value`` [B], or 0.

    Args:
        rewards, values, mask: [B,T].
        lam: One lambda, or one for each response [B] (see length_adaptive_lambda).
        lam_critic: A second lambda for the returns (VC-PPO). None uses ``lam``.
    """
    rewards, values = keep(rewards, mask), keep(values, mask)
    deltas = rewards + gamma * next_values(values, mask, bootstrap_value) - values
    advantages = _discounted_sum(deltas, mask, gamma * lam)
    lambda_returns = advantages if lam_critic is None else _discounted_sum(deltas, mask, gamma * lam_critic)
    return advantages, lambda_returns + values


@torch.no_grad()
def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Computes the lambda of each response from its number of tokens (VAPO, Yue et al. 2025): [B] -> [B].

    lambda = 1 - 1 / (alpha * length), at least 0. The sum of the weights lambda^k of all later errors is then
    alpha * length: it grows with the response.
    """
    return (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0.0)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Computes G_t = r_t + gamma * G_{t+1}: [B,T] -> [B,T]. Holes in the mask are skipped without decay."""
    return _discounted_sum(rewards, mask, gamma)


def next_values(values: Tensor, mask: Tensor, bootstrap_value: Tensor | None) -> Tensor:
    """Returns the value at the next position with mask = 1, [B,T].

    After the last such position it is ``bootstrap_value`` [B], or 0.
    """
    width = values.shape[1]
    final = (
        torch.zeros_like(values[:, 0]) if bootstrap_value is None else widen(bootstrap_value).to(values.dtype)
    )
    positions = torch.where(mask.bool(), torch.arange(width, device=values.device), width)
    following = torch.nn.functional.pad(positions[:, 1:], (0, 1), value=width)
    # the smallest position > t with mask = 1; ``width`` if there is none, which selects ``final``
    following = following.flip(1).cummin(dim=1).values.flip(1)
    return torch.cat([values, final[:, None]], dim=1).gather(1, following)


def _discounted_sum(x: Tensor, mask: Tensor, decay: float | Tensor) -> Tensor:
    """Computes y_t = x_t + decay * y_{t+1} over the positions with mask = 1; 0 elsewhere.

    ``decay`` is a number, or one number for each row [B].

    The loop issues one fused operation per position.
    """
    columns = keep(x, mask).t().contiguous()
    ones = torch.ones_like(columns)
    decays = torch.where(mask.bool().t(), (ones * decay).to(columns.dtype), ones).contiguous()
    y = torch.zeros_like(columns)
    running = torch.zeros_like(columns[0])
    for t in reversed(range(len(columns))):
        running = torch.addcmul(columns[t], decays[t], running, out=y[t])
    return keep(y.t(), mask)


@torch.no_grad()
def group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    kind: GroupBaseline,
    eps: float = 1e-6,
    lengths: Tensor | None = None,
    singleton: Literal["error", "score", "zero"] = "error",
    reduce: Reduce | None = None,
) -> Tensor:
    """Compares each score with the scores of its group, the responses to one prompt: [B], [B] -> [B].

    rloo           score - mean of the other scores (Ahmadian et al. 2024)
    grpo           (score - mean) / (std + eps), unbiased std (Shao et al. 2024)
    dr_grpo, mean  score - mean (Liu et al. 2025)
    lite_ppo       (score - mean) / (std of the scores of all groups + eps), unbiased std (arXiv 2508.08221)
    maxrl          (score - mean) / mean, and 0 if the mean is not positive (Tajwar et al. 2026)
    opo            score - mean weighted by ``lengths`` [B] (Hao et al. 2025)
    none           the score

    Args:
        singleton: Treatment of a prompt with a single response: raise ValueError ("error"), keep its score
            ("score", verl) or return 0 ("zero", NeMo).
        reduce: Sums a tensor over all ranks, for the statistics over all groups.
    """
    if kind == "none":
        return widen(scores).detach()
    # float64: equal scores must differ from their mean by 0, not by a rounding error that is divided by eps
    x = scores.double()
    _, group = torch.unique(group_ids, return_inverse=True)

    def group_sum(t: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(0, group, t)[group]

    count = group_sum(torch.ones_like(x))
    alone = count == 1
    if singleton == "error" and bool(alone.any()):
        raise ValueError(f"{kind}: a prompt with one response has no baseline; sample two or more per prompt")
    others = (count - 1).clamp(min=1)
    centred = x - group_sum(x) / count
    match kind:
        case "rloo":
            advantages = centred * count / others
        case "grpo":
            advantages = centred / ((group_sum(centred.square()) / others).sqrt() + eps)
        case "lite_ppo":
            _, variance, _ = masked_mean_var(x, torch.ones_like(x), reduce=reduce)
            advantages = centred / (variance.sqrt() + eps)
        case "maxrl":
            mean = group_sum(x) / count
            advantages = torch.where(mean > 0, centred / mean.clamp(min=eps), 0.0)
        case "dr_grpo" | "mean":
            advantages = centred
        case "opo":
            assert lengths is not None, "opo needs lengths"
            weights = lengths.double()
            advantages = x - group_sum(weights * x) / group_sum(weights).clamp(min=1)
        case _:
            raise ValueError(f"unknown group advantage {kind!r}: {', '.join(get_args(GroupBaseline))}")
    return torch.where(alone, x if singleton == "score" else 0.0, advantages).to(widen(scores).dtype)


@torch.no_grad()
def gdpo_advantages(
    scores: Tensor,
    group_ids: Tensor,
    weights: Tensor,
    eps: float = 1e-6,
    singleton: Literal["error", "score", "zero"] = "error",
    reduce: Reduce | None = None,
) -> Tensor:
    """Computes GDPO advantages (arXiv 2601.05242) from K rewards of each response: [B,K], [B], [K] -> [B].

    Each reward is normalised within its group as in GRPO. The weighted sum over the rewards is then shifted
    and divided by its mean and its unbiased standard deviation over all responses of all ranks.
    """
    columns = [group_advantages(column, group_ids, "grpo", eps, singleton=singleton) for column in scores.T]
    total = (torch.stack(columns, dim=1).double() * weights.double()).sum(1)
    mean, variance, _ = masked_mean_var(total, torch.ones_like(total), reduce=reduce)
    return ((total - mean) / (variance.sqrt() + eps)).to(widen(scores).dtype)


@torch.no_grad()
def remax_advantages(rewards: Tensor, mask: Tensor, gamma: float = 1.0, *, baselines: Tensor) -> Tensor:
    """Computes ReMax advantages (Li et al. 2024), [B,T]: discounted returns of the rewards, less a baseline.

    ``baselines`` [B] are the scores of greedy responses to the same prompts. They are subtracted at the last
    position, as if from the score.
    """
    return discounted_returns(rewards - token_rewards(baselines, mask), mask, gamma)


@torch.no_grad()
def reinforce_pp_advantages(
    token_rewards: Tensor, mask: Tensor, gamma: float = 1.0, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """Computes REINFORCE++ advantages (Hu 2025) and returns, [B,T] each.

    Advantages are the discounted returns, whitened over all ranks (unbiased).
    """
    returns = discounted_returns(token_rewards, mask, gamma)
    return masked_whiten(returns, mask, reduce=reduce), returns


@torch.no_grad()
def one_step_advantages(
    scores: Tensor, values: Tensor, whiten: bool = True, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns with the whole response as one action, [B] each.

    Advantages are scores - V(prompt), whitened over all ranks (unbiased) if ``whiten``. Returns are the
    scores.
    """
    scores = widen(scores).detach()
    advantages = scores - widen(values)
    if whiten:
        advantages = masked_whiten(advantages, torch.ones_like(advantages, dtype=torch.bool), reduce=reduce)
    return advantages, scores


@torch.no_grad()
def normalize_advantages(
    adv: Tensor,
    mask: Tensor,
    mode: Literal["none", "batch", "mean_only"] = "batch",
    unbiased: bool = False,
    clip: float | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """Normalises advantages [B,T] over the rollout of all ranks, then limits them to +-``clip``.

    "batch" gives mean 0 and variance 1, "mean_only" gives mean 0. The variance has a floor of 1e-8 (OpenRLHF,
    NeMo-Aligner), whereas masked_whiten by itself adds 1e-8 to it.
    """
    match mode:
        case "batch":
            adv = masked_whiten(adv, mask, unbiased=unbiased, eps=0.0, min_var=1e-8, reduce=reduce)
        case "mean_only":
            mean, _, _ = masked_mean_var(adv, mask, unbiased, reduce)
            adv = keep(keep(adv, mask) - mean, mask)
        case "none":
            adv = keep(adv, mask)
        case _:
            raise ValueError(f"unknown normalisation {mode!r}: none, batch or mean_only")
    return adv if clip is None else adv.clamp(-clip, clip)
