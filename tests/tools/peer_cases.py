"""Compares ppo_ds with inputs and expected values taken from other PPO/RLHF systems' own tests.

    python tests/tools/peer_cases.py [CASES.json] [--peer NAME] [--known] [--absent]

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

import argparse
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

from ppo_ds.algorithm.credit.gae import compute_gae
from ppo_ds.algorithm.credit.keys import ADVANTAGE_ESTIMATORS
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import CreditOptions, Responses
from ppo_ds.algorithm.credit.returns import discounted_sum
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl import controllers
from ppo_ds.algorithm.loss import aggregation
from ppo_ds.config import registry
from ppo_ds.config.sections.algo import GAEConfig
from ppo_ds.ops import logprobs as lp
from ppo_ds.ops import masked
from ppo_ds.ops import sequences as seqs
from ppo_ds.ops.moments import RunningMoments, explained_variance
from tests.ops import by_name

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
def masked_var(x, mask):
    return {"var": masked.masked_mean_var(x, mask, True)[1]}


@adapter
def whiten(x, mask=None, shift_mean=True, unbiased=True):
    return {"whitened": masked.masked_whiten(x, whole(x) if mask is None else mask, shift_mean, unbiased)}


@adapter
def whiten_ranks(parts, masks):
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

            masked.masked_whiten(x, m, reduce=reduce)
    out = []
    for x, m in zip(parts, masks, strict=True):
        calls = iter(range(2))
        out.append(masked.masked_whiten(x, m, reduce=lambda t, calls=calls: sums[next(calls)]))
    return {f"rank{i}": o for i, o in enumerate(out)}


def normalized(x, mask, mode, unbiased):
    """Whitens as algo.advantage.whiten does; the other modes, which it lacks, are by hand."""
    if mode == "batch":
        return by_name.normalize_advantages(x, mask, mode, unbiased)
    mean = masked.masked_mean_var(x, mask, unbiased)[0] if mode == "mean_only" else 0.0
    return masked.keep(masked.keep(x, mask) - mean, mask)


@adapter
def normalize(x, mask=None, mode="batch", unbiased=False):
    return {"normalized": normalized(x, whole(x) if mask is None else mask, mode, unbiased)}


@adapter
def normalize_groups(x, mask, size, unbiased=False):
    groups = zip(x.split(size), mask.split(size), strict=True)
    return {"normalized": torch.cat([normalized(*group, "batch", unbiased) for group in groups])}


@adapter
def std_ratio(x, mask):
    """Returns how much larger the standard deviation is if the biased variance is used for normalizing."""
    a, b = (by_name.normalize_advantages(x, mask, "batch", unbiased=u) for u in (False, True))
    return {"ratio": a.std() / b.std()}


@adapter
def gae(rewards, values, mask=None, gamma=1.0, lam=0.95, bootstrap=None, whiten_mask=None, unbiased=True):
    mask = whole(values) if mask is None else mask
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    a, r = compute_gae(rewards, masked.widen(values), mask, gamma, lam, bootstrap, None)
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
    return {"returns": r, "rewards": rewards, "whitened": masked.masked_whiten(a, mask)}


@adapter
def returns_to_go(rewards, mask, gamma=1.0):
    return {"returns": discounted_sum(rewards, mask, gamma)}


@adapter
def reinforce_pp(rewards, mask, gamma=1.0):
    a, r = by_name.reinforce_pp_advantages(rewards, mask, gamma)
    return {"advantages": a, "returns": r}


@adapter
def reinforce_pp_baseline(scores, groups, mask, whiten="masked"):
    a = seqs.broadcast_sequence(by_name.group_advantages(scores, groups, "mean", singleton="score"), mask)
    by = masked.masked_whiten if whiten == "masked" else by_name.normalize_advantages
    return {"advantages": by(a, mask) if whiten == "masked" else by(a, mask, "batch")}


@adapter
def group(scores, groups, baseline, eps=1e-6, lengths=None, singleton="none", mask=None):
    a = by_name.group_advantages(scores, groups, baseline, eps, lengths, singleton)
    out = {"advantages": a, "baseline": scores - a}
    if mask is not None:
        out["tokens"] = seqs.broadcast_sequence(a, mask)
    return out


@adapter
def group_valid(scores, groups, baseline, valid):
    """Computes the baselines of the valid rows; the other rows are removed, since ppo_ds cannot mask rows."""
    i = valid.bool().nonzero()[:, 0]
    a = by_name.group_advantages(scores[i], groups[i], baseline, singleton="zero")
    return {"baseline": scores[i] - a}


@adapter
def broadcast(x, mask):
    return {"tokens": seqs.broadcast_sequence(x, mask)}


@adapter
def kl(logprobs, ref, estimator, clamp=None, mask=None):
    logprobs = logprobs.clone().requires_grad_()
    value = by_name.approx_kl(logprobs, ref, estimator, clamp)
    if mask is not None:
        value = masked.keep(value, mask)
    (g,) = torch.autograd.grad(value.sum(), logprobs)
    return {"kl": value.detach(), "gradient": g, "mean": value.detach().mean()}


@adapter
def kl_loss(logprobs, ref, mask, estimator, coef=1.0):
    return {"loss": coef * by_name.kl_loss(logprobs, ref, mask, estimator, "token_mean")}


@adapter
def kl_rewards(scores, logprobs, ref, coef):
    mask, k = whole(logprobs), by_name.approx_kl(logprobs, ref, "k1")
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


def totals_of(spec):
    return None if spec is None else aggregation.BatchTotals(**spec)


@adapter
def aggregate(loss, mask, mode, totals=None):
    loss = loss.clone().requires_grad_() if loss.is_floating_point() else loss.float().requires_grad_()
    value = by_name.aggregate(loss, mask, mode, totals_of(totals))
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
def aggregate_uneven(parts, masks, mode):
    t = aggregation.batch_totals(masks)
    each = [by_name.aggregate(a, m, mode, t) for a, m in zip(parts, masks, strict=True)]
    return {"combined": torch.stack(each).sum()}


@adapter
def policy(logprobs, old, advantages, mask=None, totals=None, weights=None, rollout=None, **how):
    """Computes the loss, its gradient and the mean of each metric."""
    is_kind, is_low, is_high = (how.pop(f"is_{name}", None) for name in ("kind", "low", "high"))
    logprobs, old, advantages = rows(logprobs), rows(old), rows(advantages)
    mask = whole(logprobs) if mask is None else rows(mask)
    if is_kind is not None:
        weights = by_name.rollout_is_weights(old, rows(rollout), mask, is_kind, is_low, is_high)
    logprobs = logprobs.clone().requires_grad_()
    weights = None if weights is None else rows(weights)
    loss, seen = by_name.policy_loss(
        logprobs, old, advantages, mask, is_weights=weights, totals=totals_of(totals), **how
    )
    (g,) = torch.autograd.grad(loss, logprobs)
    mean = {k.split("/")[1]: (v[0] / v[1] if v.dim() else v) for k, v in seen.items()}
    return {**mean, "loss": loss.detach(), "gradient": g}


@adapter
def policy_uneven(logprobs, old, advantages, mask, sizes, **how):
    t = aggregation.batch_totals(list(mask.split(sizes)))
    each = [
        by_name.policy_loss(*x, totals=t, **how)[0]
        for x in zip(*(y.split(sizes) for y in (logprobs, old, advantages, mask)), strict=True)
    ]
    return {"combined": torch.stack(each).sum()}


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
            given = (x[s] for x in (logprobs, old, advantages, mask))
            loss, seen = by_name.policy_loss(
                *given, is_weights=None if weights is None else weights[s], **how
            )
            out[s], clipped[s] = loss, seen["policy/clipfrac"][0]
    return {"tokens": out, "clipped": clipped}


@adapter
def on_policy(logprobs, advantages, **how):
    """Computes the loss with the current policy as the old one, as ppo/by_name.py does for a single step."""
    return policy(logprobs, logprobs.detach(), advantages, **how)


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
    loss, seen = by_name.value_loss(values, old, returns, mask, totals=totals_of(totals), **how)
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
def finite(call, keys):
    out = ADAPTERS[call[0]](**call[1])
    return {"finite": torch.tensor(float(all(bool(torch.isfinite(out[k]).all()) for k in keys)))}


@adapter
def logprobs(logits, labels, temperature=1.0, chunk=1024, weights=None, entropy_weights=None):
    logits = logits.clone().requires_grad_()
    a = by_name.logprobs_from_logits(logits, labels, temperature, chunk)
    b, e = lp.logprobs_and_entropy_from_logits(logits, labels, temperature, chunk)
    loss = (b * (1.0 if weights is None else weights)).sum()
    if entropy_weights is not None:
        loss = loss + (e * entropy_weights).sum()
    (g,) = torch.autograd.grad(loss, logits)
    return {"logprobs": a.detach(), "both": b.detach(), "entropy": e.detach(), "gradient": g}


@adapter
def entropy(logits, chunk=1024, mask=None):
    e = by_name.entropy_from_logits(logits, 1.0, chunk)
    out = {"entropy": e, "mean": e.mean(), "bits": e * math.log2(math.e)}
    if mask is not None:
        out["masked"] = masked.keep(e, mask)
        out["mean"] = by_name.entropy_loss(e, mask)
    return out


@adapter
def linear(hidden, weight, labels, temperature=1.0, block=None, frozen=False):
    shape = labels.shape
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)
    a, e = by_name.linear_logprobs_and_entropy(
        hidden.flatten(0, -2), weight, None, labels.flatten(), temperature, block_elements=block
    )
    gradients = torch.autograd.grad(a.sum(), [hidden] if frozen else [hidden, weight])
    out = {"logprobs": a.detach().view(shape), "entropy": e.detach().view(shape), "hidden": gradients[0]}
    return out if frozen else {**out, "weight": gradients[1]}


@adapter
def linear_shifted(hidden, weight, ids, temperature, block=None):
    """Computes the log-probs of ids[:, 1:] from the states before them."""
    b, s, h = hidden.shape
    a, _ = by_name.linear_logprobs_and_entropy(
        hidden[:, :-1].reshape(-1, h), weight, None, ids[:, 1:].reshape(-1), temperature, block_elements=block
    )
    return {"logprobs": a.view(b, s - 1)}


@adapter
def responses(ids, stops, fill=0):
    mask, lengths, _ = seqs.response_mask(ids, stops)
    return {"mask": mask, "padding": ~mask, "lengths": lengths, "filled": torch.where(mask, ids, fill)}


@adapter
def response_slice(x, prompt, width):
    return {"slice": seqs.response_slice(x, prompt, width)}


@adapter
def positions(mask):
    return {"attended": seqs.position_ids_from_mask(mask) * mask.long()}


@adapter
def shaped(scores, **how):
    return {"scores": by_name.shape_scores(scores, **how)}


@adapter
def token_rewards(scores, mask, kl=None, kl_coef=0.0, clip=None):
    scores = by_name.shape_scores(scores, clip=clip)
    return {"rewards": by_name.token_rewards(scores, mask, kl, kl_coef, "last_token")}


@adapter
def running(batches):
    """Computes running statistics with the divisor n - 1, which trlx uses; ppo_ds divides by n."""
    m = RunningMoments()
    for b in batches:
        m.update(b)
    found = {"mean": m.mean, "std": m.std * math.sqrt(m.count / (m.count - 1))}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


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
def whitening(advantages, mask, unbiased=False):
    made = Whitening("batch", unbiased, "token")
    return {"advantages": made.whiten_rollout(advantages, mask, 1, lambda t: t)}


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=CASES, metavar="CASES.json")
    parser.add_argument("--peer", help="only the cases of this system")
    parser.add_argument("--known", action="store_true", help="show the cases that differ by design")
    parser.add_argument("--absent", action="store_true", help="show what is not offered")
    options = parser.parse_args(argv)
    if not options.file.exists():
        print(f"skipped: no cases in {options.file}")
        return 0
    data = json.loads(options.file.read_text())
    cases, known, absent = (
        [case for case in data[part] if options.peer in (None, case["peer"])]
        for part in ("cases", "known", "absent")
    )
    wrong = [(case, difference) for case in cases if (difference := compare(case))]
    for case in known if options.known else ():
        found = compare(case)
        verdict = "differs by design:" if found else "NO LONGER DIFFERS:"
        print(verdict, case["peer"], case["test"], "-", case["why"], "\n   ", found)
    for case in absent if options.absent else ():
        print("not offered:", case["peer"], case["test"], "-", case["concept"])
    counts = [
        Counter(case["peer"] for case in part) for part in (cases, [c for c, _ in wrong], known, absent)
    ]
    print(f"{'peer':36} agree disagree known  not offered")
    for name in sorted({peer for count in counts for peer in count}):
        of_all, disagree, differs, lacks = (count[name] for count in counts)
        print(f"{name:36} {of_all - disagree:5} {disagree:8} {differs:5} {lacks:11}")
    for case, difference in wrong:
        print("DISAGREES:", f"{case['peer']}  {case['test']}  [{case['concept']}]\n    {difference}")
    print(f"{len(cases) - len(wrong)} of {len(cases)}")
    return 0 if cases and not wrong else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
