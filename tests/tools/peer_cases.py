"""Compares ppo_ds with inputs and expected values taken from other PPO/RLHF systems' own tests.

    python tests/tools/peer_cases.py [CASES.json] [--peer NAME] [-v] [--known] [--absent]

Run the script from the repository root. CASES.json is ../shared/peertests/cases.json unless given. This file
is not part of the repository, and nothing can be compared without it. The script prints a table of the
systems and, last, "N of M"; it exits with 0 if all cases agree.

Each case names an adapter below, which calls ppo_ds:
    kind  asserted   a system's test asserts these values of its own inputs
          computed   the system's test contains no numbers: the results of the tested function were recorded
          reference  no test of the system covers the function: its results for new inputs were recorded
Cases under "known" are counted separately: in these, the systems disagree with each other or with the paper,
and ppo_ds has no option for the system's behaviour.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo_ds.algorithm.credit.gae import compute_gae  # noqa: E402
from ppo_ds.algorithm.credit.keys import ADVANTAGE_ESTIMATORS  # noqa: E402
from ppo_ds.algorithm.credit.positions import ScorePosition  # noqa: E402
from ppo_ds.algorithm.credit.responses import CreditOptions, Responses  # noqa: E402
from ppo_ds.algorithm.credit.returns import discounted_returns  # noqa: E402
from ppo_ds.algorithm.credit.whitening import Whitening  # noqa: E402
from ppo_ds.algorithm.kl import controllers  # noqa: E402
from ppo_ds.algorithm.loss import aggregation  # noqa: E402
from ppo_ds.compute import linear_logprobs as lin  # noqa: E402
from ppo_ds.config import registry  # noqa: E402
from ppo_ds.config.sections.algo import GAEConfig  # noqa: E402
from ppo_ds.ops import logprobs as lp  # noqa: E402
from ppo_ds.ops import masked  # noqa: E402
from ppo_ds.ops import sequences as seqs  # noqa: E402
from ppo_ds.ops.moments import explained_variance  # noqa: E402
from ppo_ds.ops.running import RunningMoments  # noqa: E402
from tests.ops import by_name  # noqa: E402

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "peertests" / "cases.json"
T = torch.Tensor


# ---- data --------------------------------------------------------------------------------------------------


def decode(x):
    if isinstance(x, dict) and "empty" in x:
        return torch.zeros(x["empty"], dtype=getattr(torch, x["d"]))
    if isinstance(x, dict) and "t" in x:
        return torch.tensor(x["t"], dtype=getattr(torch, x["d"]))
    if isinstance(x, dict) and "z" in x:
        a = np.frombuffer(zlib.decompress(base64.b64decode(x["z"])), dtype=x["np"]).reshape(x["s"]).copy()
        return torch.from_numpy(a).to(getattr(torch, x["d"]))
    if isinstance(x, dict):
        return {k: decode(v) for k, v in x.items()}
    return [decode(v) for v in x] if isinstance(x, list) else x


# ---- adapters: each returns the results of ppo_ds as a dict ------------------------------------------------

ADAPTERS = {}


def adapter(f):
    ADAPTERS[f.__name__] = f
    return f


def whole(x: T) -> T:
    return torch.ones_like(x, dtype=torch.bool)


def rows(x: T) -> T:
    """Returns a one-dimensional tensor as a matrix with one row."""
    return x if x.dim() > 1 else x[None]


@adapter
def masked_mean(x, mask, dim=None):
    return {"mean": masked.masked_mean(x, mask, dim)}


@adapter
def masked_mean_of_rows(x, mask):
    """Computes the mean over rows of their means; an empty row counts as 0, as in open-instruct."""
    means = masked.masked_mean(x, mask, -1)
    return {"mean": means.mean(-1)}


@adapter
def masked_var(x, mask, unbiased=True):
    mean, var, count = masked.masked_mean_var(x, mask, unbiased)
    return {"mean": mean, "var": var}


@adapter
def whiten(x, mask=None, shift_mean=True, unbiased=True, eps=1e-8):
    mask = whole(x) if mask is None else mask
    return {"whitened": masked.masked_whiten(x, mask, shift_mean, unbiased, eps)}


@adapter
def whiten_ranks(parts, masks, unbiased=True):
    """Whitens on simulated ranks, one after the other, once two passes have computed the sums over ranks."""
    sums = [torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    for k in range(2):
        for x, m in zip(parts, masks, strict=True):
            calls = iter(range(2))

            def reduce(t, k=k, calls=calls):
                i = next(calls)
                if i == k:
                    sums[k] += t
                return sums[i] if i < k else t

            masked.masked_whiten(x, m, unbiased=unbiased, reduce=reduce)
    out = []
    for x, m in zip(parts, masks, strict=True):
        calls = iter(range(2))
        out.append(
            masked.masked_whiten(x, m, unbiased=unbiased, reduce=lambda t, calls=calls: sums[next(calls)])
        )
    return {f"rank{i}": o for i, o in enumerate(out)}


def normalized(x, mask, mode, unbiased, clip=None):
    """Whitens as algo.advantage.whiten does; the other modes and the clip, which it lacks, are by hand."""
    if mode == "batch":
        x = by_name.normalize_advantages(x, mask, mode, unbiased)
    elif mode == "mean_only":
        mean, _, _ = masked.masked_mean_var(x, mask, unbiased)
        x = masked.keep(masked.keep(x, mask) - mean, mask)
    else:
        x = masked.keep(x, mask)
    return x if clip is None else x.clamp(-clip, clip)


@adapter
def normalize(x, mask=None, mode="batch", unbiased=False, clip=None):
    return {"normalized": normalized(x, whole(x) if mask is None else mask, mode, unbiased, clip)}


@adapter
def normalize_groups(x, mask, size, mode="batch", unbiased=False):
    groups = zip(x.split(size), mask.split(size), strict=True)
    return {"normalized": torch.cat([normalized(*group, mode, unbiased) for group in groups])}


@adapter
def std_ratio(x, mask):
    """Returns how much larger the standard deviation is if the biased variance is used for normalizing."""
    a, b = (by_name.normalize_advantages(x, mask, "batch", unbiased=u) for u in (False, True))
    return {"ratio": a.std() / b.std()}


@adapter
def gae(
    rewards,
    values,
    mask=None,
    gamma=1.0,
    lam=0.95,
    lam_critic=None,
    bootstrap=None,
    whiten_mask=None,
    unbiased=True,
):
    mask = whole(values) if mask is None else mask
    a, r = compute_gae(
        rewards.float() if not rewards.is_floating_point() else rewards,
        masked.widen(values),
        mask,
        gamma,
        lam,
        bootstrap,
        lam_critic,
    )
    out = {"advantages": a, "returns": r}
    if whiten_mask is not None:
        out["whitened"] = masked.masked_whiten(a, whiten_mask, unbiased=unbiased)
        out["whitened_keeping_mean"] = masked.masked_whiten(
            a, whiten_mask, shift_mean=False, unbiased=unbiased
        )
    return out


@adapter
def gae_from_scores(scores, values, mask, gamma=1.0, lam=0.95, lam_critic=None, kl=None, kl_coef=0.0):
    rewards = by_name.token_rewards(scores, mask, kl, kl_coef)
    a, r = compute_gae(rewards, values, mask, gamma, lam, None, lam_critic)
    return {"advantages": a, "returns": r, "whitened": masked.masked_whiten(a, mask), "rewards": rewards}


@adapter
def gae_next_token(scores, values, mask, kl, kl_coef, gamma, lam, whiten_rewards=False):
    """Computes GAE as TRL and DeepSpeed-Chat do: the score is at a separate state after the last action."""
    states = seqs.next_token_mask(mask)
    rewards = by_name.token_rewards(scores, mask, kl, kl_coef, "next_token")
    if whiten_rewards:
        rewards = masked.masked_whiten(rewards, states, shift_mean=False)
    a, r = compute_gae(rewards, values, states, gamma, lam)
    return {
        "advantages": a,
        "returns": r,
        "rewards": rewards,
        "whitened": masked.masked_whiten(a, mask),
        "states": states,
    }


@adapter
def gae_ignored_rows(rewards, values, mask, gamma, lam):
    a, r = compute_gae(rewards, values, mask, gamma, lam)
    return {"advantages": a, "returns": masked.keep(r, mask)}


@adapter
def returns_to_go(rewards, mask, gamma=1.0):
    return {"returns": discounted_returns(rewards, mask, gamma)}


@adapter
def reinforce_pp(rewards, mask, gamma=1.0):
    a, r = by_name.reinforce_pp_advantages(rewards, mask, gamma)
    return {"advantages": a, "returns": r}


@adapter
def reinforce_pp_baseline(scores, groups, mask, singleton="score", whiten="masked"):
    a = seqs.broadcast_sequence(by_name.group_advantages(scores, groups, "mean", singleton=singleton), mask)
    a = (
        masked.masked_whiten(a, mask)
        if whiten == "masked"
        else by_name.normalize_advantages(a, mask, "batch")
    )
    return {"advantages": a}


@adapter
def group(scores, groups, baseline, eps=1e-6, lengths=None, singleton="none", mask=None):
    a = by_name.group_advantages(scores, groups, baseline, eps, lengths, singleton)
    out = {"advantages": a, "baseline": scores - a}
    if mask is not None:
        out["tokens"] = seqs.broadcast_sequence(a, mask)
    return out


@adapter
def group_valid(scores, groups, baseline, valid, singleton="zero"):
    """Computes the baselines of the valid rows; the other rows are removed, since ppo_ds cannot mask rows."""
    i = valid.bool().nonzero()[:, 0]
    a = by_name.group_advantages(scores[i], groups[i], baseline, singleton=singleton)
    return {"baseline": scores[i] - a}


@adapter
def broadcast(x, mask):
    return {"tokens": seqs.broadcast_sequence(x, mask)}


@adapter
def kl(logprobs, ref, estimator, clamp=None, mask=None, weights=None):
    logprobs = logprobs.clone().requires_grad_()
    value = by_name.approx_kl(logprobs, ref, estimator, clamp)
    if mask is not None:
        value = masked.keep(value, mask)
    (g,) = torch.autograd.grad((value if weights is None else value * weights).sum(), logprobs)
    return {"kl": value.detach(), "gradient": g, "mean": value.detach().mean()}


@adapter
def kl_loss(logprobs, ref, mask, estimator, coef=1.0, agg="token_mean"):
    return {"loss": coef * by_name.kl_loss(logprobs, ref, mask, estimator, agg)}


@adapter
def kl_rewards(scores, logprobs, ref, coef, mask=None, estimator="k1"):
    mask = whole(logprobs) if mask is None else mask
    k = by_name.approx_kl(logprobs, ref, estimator)
    return {
        "kl": k,
        "kl_rewards": by_name.token_rewards(torch.zeros_like(scores), mask, k, coef),
        "rewards": by_name.token_rewards(scores, mask, k, coef),
    }


@adapter
def kl_controller(kind, init, updates, **how):
    c = {"fixed": controllers.FixedKLController, "adaptive": controllers.AdaptiveKLController}[kind](
        init, **how
    )
    values = []
    for current, steps in updates:
        c.update(current, steps)
        values.append(c.value)
    return {"values": torch.tensor(values, dtype=torch.float64)}


def totals_of(masks, spec):
    return None if spec is None else aggregation.BatchTotals(**spec)


@adapter
def aggregate(loss, mask, mode, totals=None, scale=1.0):
    loss = loss.clone().requires_grad_() if loss.is_floating_point() else loss.float().requires_grad_()
    value = by_name.aggregate(loss, mask, mode, totals_of(mask, totals)) * scale
    (g,) = torch.autograd.grad(value, loss)
    return {"loss": value.detach(), "gradient": g}


@adapter
def aggregate_parts(loss, mask, mode, rows_per_part, dp_size=1, norm=None):
    """Aggregates the loss of each micro-batch or rank, and combines the parts into the loss of the whole."""
    whole_totals = aggregation.batch_totals(list(mask.split(rows_per_part)), norm=norm, dp_size=dp_size)
    parts = torch.stack(
        [
            by_name.aggregate(a, m, mode, whole_totals)
            for a, m in zip(loss.split(rows_per_part), mask.split(rows_per_part), strict=True)
        ]
    )
    return {"combined": parts.sum() / dp_size, "parts": parts}


@adapter
def aggregate_uneven(parts, masks, mode, norm=None):
    t = aggregation.batch_totals(masks, norm=norm)
    each = [by_name.aggregate(a, m, mode, t) for a, m in zip(parts, masks, strict=True)]
    return {"combined": torch.stack(each).sum()}


@adapter
def policy(
    logprobs,
    old,
    advantages,
    mask=None,
    totals=None,
    scale=1.0,
    weights=None,
    rollout=None,
    is_kind=None,
    is_low=None,
    is_high=None,
    **how,
):
    """Computes the loss, its gradient and the mean of each metric."""
    logprobs, old, advantages = rows(logprobs), rows(old), rows(advantages)
    mask = whole(logprobs) if mask is None else rows(mask)
    if is_kind is not None:
        weights = by_name.rollout_is_weights(old, rows(rollout), mask, is_kind, is_low, is_high)
    logprobs = logprobs.clone().requires_grad_()
    loss, seen = by_name.policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        is_weights=None if weights is None else rows(weights),
        totals=totals_of(mask, totals),
        **how,
    )
    (g,) = torch.autograd.grad(loss, logprobs)
    mean = {k.split("/")[1]: (v[0] / v[1] if v.dim() else v) for k, v in seen.items()}
    return {**mean, "loss_metric": mean["loss"], "loss": loss.detach() * scale, "gradient": g * scale}


@adapter
def policy_parts(logprobs, old, advantages, mask, rows_per_part, dp_size=1, **how):
    t = aggregation.batch_totals(list(mask.split(rows_per_part)), dp_size=dp_size)
    each = [
        by_name.policy_loss(*x, totals=t, **how)[0]
        for x in zip(*(y.split(rows_per_part) for y in (logprobs, old, advantages, mask)), strict=True)
    ]
    return {"combined": torch.stack(each).sum() / dp_size}


@adapter
def policy_uneven(logprobs, old, advantages, mask, sizes, dp_size=1, **how):
    t = aggregation.batch_totals(list(mask.split(sizes)), dp_size=dp_size)
    each = [
        by_name.policy_loss(*x, totals=t, **how)[0]
        for x in zip(*(y.split(sizes) for y in (logprobs, old, advantages, mask)), strict=True)
    ]
    return {"combined": torch.stack(each).sum() / dp_size}


@adapter
def policy_tokens(logprobs, old, advantages, mask=None, weights=None, **how):
    """Computes the loss of each token separately, as rows of one token each."""
    logprobs, old, advantages = rows(logprobs), rows(old), rows(advantages)
    mask = whole(logprobs) if mask is None else rows(mask)
    weights = None if weights is None else rows(weights)
    out = torch.zeros_like(logprobs)
    clipped = torch.zeros_like(logprobs)
    for i in range(len(logprobs)):
        for t in range(logprobs.shape[1]):
            s = (slice(i, i + 1), slice(t, t + 1))
            loss, seen = by_name.policy_loss(
                logprobs[s],
                old[s],
                advantages[s],
                mask[s],
                is_weights=None if weights is None else weights[s],
                **how,
            )
            out[s], clipped[s] = loss, seen["policy/clipfrac"][0]
    return {"tokens": out, "clipped": clipped}


@adapter
def on_policy(logprobs, advantages, mask=None, **how):
    """Computes the loss with the current policy as the old one, as ppo/by_name.py does for a single step."""
    return policy(logprobs, logprobs.detach(), advantages, mask, **how)


@adapter
def policy_with_kl(logprobs, old, advantages, ref, mask, coef, estimator, agg="token_mean", **how):
    logprobs = logprobs.clone().requires_grad_()
    loss = by_name.policy_loss(logprobs, old, advantages, mask, agg=agg, **how)[0] + coef * by_name.kl_loss(
        logprobs, ref, mask, estimator, agg
    )
    (g,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.detach(), "gradient": g}


@adapter
def is_weights(old, rollout, mask, kind, low, high):
    w = by_name.rollout_is_weights(old, rollout, mask, kind, low, high)
    return {"weights": w, "kept": (w != 0).float(), "row": w[:, :1]}


@adapter
def value(values, old, returns, mask=None, totals=None, scale=1.0, **how):
    values, old, returns = rows(values), rows(old), rows(returns)
    mask = whole(values) if mask is None else rows(mask)
    values = values.clone().requires_grad_()
    loss, seen = by_name.value_loss(values, old, returns, mask, totals=totals_of(mask, totals), **how)
    (g,) = torch.autograd.grad(loss, values)
    c = seen["value/clipfrac"]
    return {
        "loss": loss.detach() * scale,
        "gradient": g * scale,
        "clipfrac": c[0] / c[1],
        "explained": torch.tensor(explained_variance(seen["value/explained_var"])),
    }


@adapter
def value_parts(values, old, returns, mask, rows_per_part, dp_size=1, norm=None, **how):
    values = values.clone().requires_grad_()
    t = aggregation.batch_totals(list(mask.split(rows_per_part)), norm=norm, dp_size=dp_size)
    each, parts = [], Counter()
    for x in zip(*(y.split(rows_per_part) for y in (values, old, returns, mask)), strict=True):
        loss, seen = by_name.value_loss(*x, totals=t, **how)
        each.append(loss)
        parts["loss"] = parts["loss"] + seen["value/loss"]
    total = torch.stack(each).sum() / dp_size
    (g,) = torch.autograd.grad(total, values)
    return {"combined": total.detach(), "gradient": g, "metric": parts["loss"][0] / parts["loss"][1]}


@adapter
def order(first, second):
    """Checks that the first of two losses is smaller than the second."""
    a, b = (ADAPTERS[name](**args)["loss"] for name, args in (first, second))
    return {"smaller": (a < b).float()}


@adapter
def differs(first, second, key):
    """Checks that two settings give different results."""
    a, b = (ADAPTERS[name](**args)[key] for name, args in (first, second))
    return {"differs": torch.tensor(float(not torch.allclose(a.float(), b.float(), rtol=1e-3)))}


@adapter
def same(first, second, key):
    a, b = (ADAPTERS[name](**args)[key] for name, args in (first, second))
    return {"same": torch.tensor(float(torch.allclose(a, b)))}


@adapter
def finite(call, keys):
    out = ADAPTERS[call[0]](**call[1])
    return {"finite": torch.tensor(float(all(bool(torch.isfinite(out[k]).all()) for k in keys)))}


@adapter
def logprobs(logits, labels, temperature=1.0, chunk=1024, weights=None, entropy_weights=None):
    logits = logits.clone().requires_grad_()
    a = lp.logprobs_from_logits(logits, labels, temperature, chunk)
    b, e = lp.logprobs_and_entropy_from_logits(logits, labels, temperature, chunk)
    loss = (b * (1.0 if weights is None else weights)).sum()
    if entropy_weights is not None:
        loss = loss + (e * entropy_weights).sum()
    (g,) = torch.autograd.grad(loss, logits)
    return {
        "logprobs": a.detach(),
        "both": b.detach(),
        "entropy": e.detach(),
        "gradient": g,
        "sum": a.detach().sum(-1),
    }


@adapter
def entropy(logits, temperature=1.0, chunk=1024, mask=None):
    e = lp.entropy_from_logits(logits, temperature, chunk)
    out = {"entropy": e, "mean": e.mean(), "bits": e * math.log2(math.e)}
    if mask is not None:
        out["masked"] = masked.keep(e, mask)
        out["mean"] = by_name.entropy_loss(e, mask)
    return out


@adapter
def linear(hidden, weight, labels, temperature=1.0, block=None, frozen=False):
    shape = labels.shape
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    a, e = lin.linear_logprobs_and_entropy(
        hidden.flatten(0, -2), weight, None, labels.flatten(), temperature, block_elements=block
    )
    gradients = torch.autograd.grad(a.sum(), [hidden] if frozen else [hidden, weight])
    out = {"logprobs": a.detach().view(shape), "entropy": e.detach().view(shape), "hidden": gradients[0]}
    return out if frozen else {**out, "weight": gradients[1]}


@adapter
def linear_shifted(hidden, weight, ids, temperature, block=None):
    """Computes the log-probs of ids[:, 1:] from the states before them."""
    b, s, h = hidden.shape
    a, _ = lin.linear_logprobs_and_entropy(
        hidden[:, :-1].reshape(-1, h), weight, None, ids[:, 1:].reshape(-1), temperature, block_elements=block
    )
    return {"logprobs": a.view(b, s - 1)}


@adapter
def responses(ids, stops, pad=None, fill=0, include_eos=True):
    mask, lengths, finished = seqs.response_mask(ids, stops, include_eos=include_eos)
    return {
        "mask": mask,
        "padding": ~mask,
        "lengths": lengths,
        "finished": finished,
        "filled": torch.where(mask, ids, fill),
    }


@adapter
def response_slice(x, prompt, width):
    return {"slice": seqs.response_slice(x, prompt, width)}


@adapter
def places(mask):
    return {"last": seqs.last_token_index(mask), "next": seqs.next_token_mask(mask)}


@adapter
def positions(mask):
    return {"attended": seqs.position_ids_from_mask(mask) * mask.long()}


@adapter
def shaped(scores, key="scores", **how):
    return {key: by_name.shape_scores(scores, **how)}


@adapter
def token_rewards(scores, mask, kl=None, kl_coef=0.0, clip=None, place="last_token"):
    scores = by_name.shape_scores(scores, clip=clip)
    return {"rewards": by_name.token_rewards(scores, mask, kl, kl_coef, place)}


@adapter
def running(batches):
    """Computes running statistics with the divisor n - 1, which trlx uses; ppo_ds divides by n."""
    m = RunningMoments()
    for b in batches:
        m.update(b)
    f = lambda n: math.sqrt(n / (n - 1))  # noqa: E731
    return {
        "mean": torch.tensor(m.mean, dtype=torch.float64),
        "std": torch.tensor(m.std * f(m.count), dtype=torch.float64),
    }


class Ids:
    """Tokenizes texts that consist of ids separated by spaces."""

    def encode_many(self, texts, special_tokens=False):
        return [[int(i) for i in t.split()] for t in texts]

    def decode(self, ids):
        return " ".join(map(str, ids))


class Characters:
    def encode_many(self, texts, special_tokens=False):
        return [[ord(c) for c in t] for t in texts]

    def decode(self, ids):
        return "".join(map(chr, ids))


@adapter
def repetition(ids, n, max_penalty):
    from ppo_ds.rewards.rules import RepetitionPenalty

    rule = RepetitionPenalty(n, max_penalty, "tokens", tokenizer=Ids())
    return {"scores": torch.tensor([rule.rate(" ".join(map(str, row)), {}) for row in ids])}


@adapter
def numeric(texts, references):
    from ppo_ds.rewards.rules import NumericReward

    rule = NumericReward(tokenizer=Characters())
    return {
        "scores": torch.tensor([rule.rate(t, {"answer": r}) for t, r in zip(texts, references, strict=True)])
    }


@adapter
def regex(texts, pattern, full=False):
    from ppo_ds.rewards.rules import RegexReward

    rule = RegexReward(pattern, full, tokenizer=Characters())
    return {"scores": torch.tensor([rule.rate(t, {}) for t in texts])}


@adapter
def algorithm(kind, rewards, mask, scores, group_size, gamma=1.0):
    """Estimates advantages from token rewards with the estimator ``kind`` of ADVANTAGE_ESTIMATORS."""
    position = ScorePosition("last_token", "untrained")
    rollout = SimpleNamespace(
        response_mask=mask,
        response_lengths=mask.sum(1),
        finished=torch.ones(len(mask), dtype=torch.bool),
        components=(),
        baselines=None,
    )
    padded = torch.nn.functional.pad(rewards, (0, 1))
    given = Responses.of_rollout(rollout, position, padded, scores, None, group_size)
    estimate = registry.import_target(ADVANTAGE_ESTIMATORS[kind].function)
    found = estimate(given, CreditOptions(gae=GAEConfig(gamma=gamma)))
    return {"advantages": found.advantages}


@adapter
def whitening(advantages, mask, over="batch", unbiased=False, level="token", group_size=1):
    made = Whitening(over, unbiased, level)
    return {"advantages": made.whiten_rollout(advantages, mask, group_size, lambda t: t)}


MINIMAL = {
    "actor.model.path": "org/actor",
    "data.path": "org/prompts",
    "reward._target_": "ppo_ds.rewards.function.FunctionReward",
    "reward.path": "pkg.mod:score",
    "rollout.prompts_per_step": 8,
    "rollout.samples_per_prompt": 1,
    "sampling.max_new_tokens": 8,
    "run.steps": 1,
}
RENAMED = {"algo.correction": "algo.rollout_is", "algo.policy.kind": "algo.policy.loss"}


@adapter
def config(keys):
    """Checks that a config may have these keys; errors about other keys are ignored."""
    from ppo_ds.config.validation import validated
    from ppo_ds.errors import UserError

    for old, new in RENAMED.items():
        keys = {key.replace(old, new): value for key, value in keys.items()}
    tree = {}
    for key, value in {**MINIMAL, **keys}.items():
        at = tree
        *path, last = key.split(".")
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    try:
        validated(tree, 1)
    except UserError as error:
        about = [line for line in error.problems if any(key in line for key in keys)]
        assert not about, about[0]
    return {"allowed": torch.tensor(1.0)}


# ---- comparison --------------------------------------------------------------------------------------------


def compare(case):
    """Returns None if ppo_ds agrees with a case, otherwise a description of the difference."""
    try:
        got = ADAPTERS[case["adapter"]](**decode(case["args"]))
    except Exception as error:  # noqa: BLE001
        return None if case.get("raises") else f"{type(error).__name__}: {error}"
    if case.get("raises"):
        return "raised nothing"
    for key, want in case["expect"].items():
        where = None
        if isinstance(want, dict) and "where" in want:
            where, want = decode(want["where"]).bool(), want["value"]
        want = decode(want)
        want = want if isinstance(want, torch.Tensor) else torch.tensor(want)
        have = got[key]
        if where is not None:
            have, want = have[where], want[where]
        if have.shape != want.shape and have.numel() == want.numel():
            have = have.reshape(want.shape)
        if have.shape != want.shape:
            return f"{key}: shape {tuple(have.shape)}, not {tuple(want.shape)}"
        a, b = have.double(), want.double()
        if not torch.allclose(a, b, rtol=case["rtol"], atol=case["atol"], equal_nan=True):
            worst = (a - b).abs().nan_to_num(nan=math.inf).max().item()
            return f"{key}: off by {worst:.3g}: {shown(a)} instead of {shown(b)}"
    return None


def shown(x: T) -> str:
    flat = x.flatten().tolist()
    return "[" + ", ".join(f"{v:.6g}" for v in flat[:8]) + (", ..." if len(flat) > 8 else "") + "]"


def main(argv):
    peer = argv[argv.index("--peer") + 1] if "--peer" in argv else None
    named = [Path(word) for word in argv if word.endswith(".json")]
    file = named[0] if named else CASES
    if not file.exists():
        print(f"skipped: no cases in {file}")
        return 0
    data = json.loads(file.read_text())
    agree, disagree, absent, known, failures = Counter(), Counter(), Counter(), Counter(), []
    kinds = Counter()
    for case in data["cases"]:
        if peer and case["peer"] != peer:
            continue
        wrong = compare(case)
        (disagree if wrong else agree)[case["peer"]] += 1
        kinds[case["kind"]] += not wrong
        if wrong:
            failures.append(f"{case['peer']}  {case['test']}  [{case['concept']}]\n    {wrong}")
        elif "-v" in argv:
            print(
                "agrees:",
                case["peer"],
                case["test"],
                f"[{case['kind']}]",
                f"({case['switch']})" if case.get("switch") else "",
            )
    for case in data["known"]:
        if peer and case["peer"] != peer:
            continue
        wrong = compare(case)
        known[case["peer"]] += 1
        if "--known" in argv:
            print(
                "differs by design:" if wrong else "NO LONGER DIFFERS:",
                case["peer"],
                case["test"],
                "-",
                case["why"],
                "\n   ",
                wrong,
            )
    for case in data["absent"]:
        if peer and case["peer"] != peer:
            continue
        absent[case["peer"]] += 1
        if "--absent" in argv:
            print("not offered:", case["peer"], case["test"], "-", case["concept"])
    print(f"{'peer':36} agree disagree known  not offered")
    for name in sorted({*agree, *disagree, *known, *absent}):
        print(f"{name:36} {agree[name]:5} {disagree[name]:8} {known[name]:5} {absent[name]:11}")
    print("of those that agree:", ", ".join(f"{n} {k}" for k, n in sorted(kinds.items())))
    for failure in failures:
        print("DISAGREES:", failure)
    n, m = sum(agree.values()), sum(agree.values()) + sum(disagree.values())
    print(f"{n} of {m}")
    return 0 if n == m and m else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
