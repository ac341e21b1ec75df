"""Computes PPO's formulas by plain loops over numbers, for cases without a golden.

The loops share no code with ppo_ds, and are compared with the goldens too. Arrays are numpy float64 [B,T];
masks are [B,T]. Every loss is returned with its gradient.
"""

from __future__ import annotations

import math

import numpy as np


def weights(mask, agg):
    """Returns the weight of each position in the aggregation ``agg``, [B,T]."""
    tokens, answers = mask.sum(), mask.any(1).sum()
    out = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        for t in np.flatnonzero(row):
            out[i, t] = {
                "token_mean": 1 / tokens,
                "seq_mean_token_mean": 1 / (answers * row.sum()),
                "seq_mean_token_sum": 1 / answers,
            }[agg]
    return out


def policy_loss(now, old, advantages, mask, *, low=0.2, high=0.2, dual=None, agg="token_mean"):
    weight, loss, gradient = weights(mask, agg), 0.0, np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        a, r = advantages[i, t], math.exp(now[i, t] - old[i, t])
        term, slope = max(
            (-a * r, -a * r), (-a * min(max(r, 1 - low), 1 + high), 0.0), key=lambda pair: pair[0]
        )
        if dual is not None and a < 0 and term > -a * dual:
            term, slope = -a * dual, 0.0
        loss += weight[i, t] * term
        gradient[i, t] = weight[i, t] * slope
    return loss, gradient


def value_loss(now, old, returns, mask, *, clip=None, half=True, agg="token_mean"):
    weight, loss, gradient = weights(mask, agg), 0.0, np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        error = now[i, t] - returns[i, t]
        term, slope = error**2, 2 * error
        if clip is not None:
            bounded = min(max(now[i, t], old[i, t] - clip), old[i, t] + clip)
            if (bounded - returns[i, t]) ** 2 > term:
                term, slope = (bounded - returns[i, t]) ** 2, 0.0
        factor = weight[i, t] * (0.5 if half else 1.0)
        loss += factor * term
        gradient[i, t] = factor * slope
    return loss, gradient


def k3_loss(now, ref, mask, agg="token_mean"):
    weight, loss, gradient = weights(mask, agg), 0.0, np.zeros(mask.shape)
    for i, t in np.argwhere(mask):
        d = now[i, t] - ref[i, t]
        loss += weight[i, t] * (math.exp(-d) - 1 + d)
        gradient[i, t] = weight[i, t] * (1 - math.exp(-d))
    return loss, gradient


def rewards(scores, kl, mask, coef):
    """Returns -coef * KL on each action, and adds the score on the last one."""
    out = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        out[i, row] = -coef * kl[i, row]
        out[i, np.flatnonzero(row)[-1]] += scores[i]
    return out


def gae(rewards, values, mask, gamma, lam):
    """Returns advantages and returns, for masks without holes."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for i, row in enumerate(mask):
        after, advantage = 0.0, 0.0
        for t in reversed(range(row.sum())):
            advantage = rewards[i, t] + gamma * after - values[i, t] + gamma * lam * advantage
            after = values[i, t]
            advantages[i, t], returns[i, t] = advantage, advantage + values[i, t]
    return advantages, returns


def whitened(advantages, mask, unbiased):
    found = [advantages[i, t] for i, t in np.argwhere(mask)]
    mean = sum(found) / len(found)
    variance = sum((a - mean) ** 2 for a in found) / (len(found) - unbiased)
    return np.where(mask, (advantages - mean) / math.sqrt(variance), 0.0)
