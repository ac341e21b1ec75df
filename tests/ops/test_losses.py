"""Tests losses: goldens of six systems with their gradients, hand-computed numbers, metrics."""

import math

import pytest
import torch

from ppo_ds.algorithm.loss.aggregation import batch_totals
from ppo_ds.ops.moments import explained_variance
from ppo_ds.ops.sequences import next_token_mask
from tests.ops.by_name import (
    aggregate,
    gmpo_loss,
    kl_loss,
    policy_loss,
    rollout_is_weights,
    sapo_loss,
    value_loss,
)
from tests.ops.golden import Close, assert_no_stale_entries, check, gradient, leaf, outputs

SEQUENCE, TOKEN_SUM, NORM = "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"


def number(metric):
    """Turns (sum, count) into a mean."""
    total, count = metric
    return total / count


# policy_loss.json -------------------------------------------------------------------------------------------
def ppo(x, c, is_weights=None, one_advantage=False, **options):
    """Computes the PPO loss; ``one_advantage`` uses the first token's advantage for the whole response."""
    advantages = c.advantages[:, 0] if one_advantage else c.advantages
    return policy_loss(x, c.old_logprobs, advantages, c.mask, is_weights=is_weights, **options)


def variant(high=False, dual=None, **options):
    """Makes a function (logprobs, case) -> loss with the clip range and dual clip of the case."""

    def loss(x, c):
        p = c.params
        clips = {"clip_low": p["clip"], "clip_high": p["clip_high"] if high else None, "dual_clip": dual}
        return ppo(x, c, **(clips | options))

    return loss


def gspo(eps=None, **options):
    def loss(x, c):
        low, high = eps or c.params["gspo_eps"]
        return ppo(x, c, clip_low=low, clip_high=high, kind="gspo", agg=SEQUENCE, **options)

    return loss


def importance(kind):
    def loss(x, c):
        weights = rollout_is_weights(
            c.old_logprobs, c.rollout_logprobs, c.mask, kind, *c.params["is_threshold"]
        )
        return ppo(x, c, is_weights=weights)

    return loss


def with_value(x, c):
    """Computes torchtune's total loss: clipped policy loss + 0.1 * clipped value loss."""
    value, _ = value_loss(c.values, c.old_values, c.returns, c.mask, clip=c.params["clip"])
    policy, metrics = variant(log_ratio_clamp=math.inf)(x, c)
    return policy + 0.1 * value, metrics


def sapo(x, c):
    tau_pos, tau_neg = c.params["sapo_tau"]
    args = x, c.old_logprobs, c.advantages, c.mask
    return sapo_loss(*args, tau_pos=tau_pos, tau_neg=tau_neg, agg=SEQUENCE)


def gmpo(x, c):
    clips = {"clip_low": c.params["clip"], "clip_high": c.params["clip"]}
    args = x, c.old_logprobs, c.advantages[:, 0], c.mask  # the peer's case has one advantage per response
    return gmpo_loss(*args, log_ratio_clamp=math.inf, agg=SEQUENCE, **clips)


UNLIMITED = variant(log_ratio_clamp=math.inf)  # these peers do not clamp the log-ratio
LOSSES = {
    "dschat.actor_loss_fn": UNLIMITED,
    "trl.pg_loss": UNLIMITED,
    "torchtune.PPOLoss": with_value,
    "torchtune.PPOLoss.policy": UNLIMITED,
    "seed_a.compute_policy_loss": variant(log_ratio_clamp=math.inf, agg=SEQUENCE),
    "openrlhf.PolicyLoss.eps0.2": variant(),
    "openrlhf.PolicyLoss.eps0.2_0.28": variant(high=True),
    "openrlhf.PolicyLoss.dual3": variant(dual=3.0),
    "openrlhf.PolicyLoss.dual3_seqmean": variant(dual=3.0, agg=SEQUENCE),
    "openrlhf.PolicyLoss.gspo": gspo(log_ratio_clamp=math.inf),
    "openrlhf.PolicyLoss.tis": importance("tis"),
    "openrlhf.PolicyLoss.icepop": importance("icepop"),
    "openrlhf.PolicyLoss.seq-mask-tis": importance("seq_mask_tis"),
    "verl.vanilla.token-mean": variant(dual=3.0),
    "verl.vanilla.seq-mean-token-sum": variant(dual=3.0, agg=TOKEN_SUM),
    "verl.vanilla.seq-mean-token-mean": variant(dual=3.0, agg=SEQUENCE),
    "verl.vanilla.seq-mean-token-sum-norm": variant(dual=3.0, agg=NORM),
    "verl.vanilla.clip_higher": variant(high=True, dual=3.0),
    "verl.vanilla.c10": variant(dual=10.0),
    "verl.gspo": gspo(one_advantage=True, log_ratio_clamp=math.inf),
    "verl.gspo.eps0.2": gspo((0.2, 0.2), one_advantage=True, log_ratio_clamp=math.inf),
    "verl.cispo": variant(kind="cispo"),
    "verl.gpg": variant(kind="reinforce"),
    "verl.sapo": sapo,
    "verl.geo_mean": gmpo,
}
METRICS = {
    "clip_ratio": "policy/clipfrac",
    "pg_clipfrac": "policy/clipfrac",
    "ppo_kl": "policy/kl_k1",
    "pg_clipfrac_lower": "policy/clipfrac_low",
}


def tolerant(key, actual):
    if key.startswith(("seed_a", "verl.geo_mean")):
        return Close(actual, 1e-7, "divides by n + 1e-8")
    return actual


def mean_metric(c, loss, name):
    tolerance = 1e-9 if c.logprobs.dtype == torch.float64 else 2e-5
    return Close(
        number(loss(c.logprobs, c)[1][name]), tolerance, "verl divides by n + 1e-8 and gives plain numbers"
    )


def policy_targets():
    targets = {}
    for key, loss in LOSSES.items():
        targets[key] = lambda c, f=loss, k=key: tolerant(k, f(c.logprobs, c)[0])
        targets[f"{key}.grad"] = lambda c, f=loss, k=key: tolerant(
            k, (lambda x: gradient(f(x, c)[0], x))(leaf(c.logprobs))
        )
        for peer_name, ours in METRICS.items():
            targets[f"{key}.{peer_name}"] = lambda c, f=loss, n=ours: mean_metric(c, f, n)
    targets["torchtune.PPOLoss.parts.policy_loss"] = lambda c: UNLIMITED(c.logprobs, c)[0]
    targets["torchtune.PPOLoss.parts.value_loss"] = lambda c: value_loss(
        c.values, c.old_values, c.returns, c.mask, clip=0.2
    )[0]
    targets["torchtune.PPOLoss.parts.clipfrac"] = lambda c: number(
        UNLIMITED(c.logprobs, c)[1]["policy/clipfrac"]
    )
    return targets


POLICY = policy_targets()
OVER_PADDING = "averages over padding too; ours is masked, see test_metrics_are_masked_sums_with_counts"
NOT_POLICY = {
    "*_over_all_places": OVER_PADDING,
    "extreme_ratio/verl.*.ppo_kl": (
        "k1 of the clamped log-ratio; ours is unclamped, as OpenRLHF's, which is compared"
    ),
    "overflow_f32/dschat.actor_loss_fn.grad": "NaN; the right one is in test_a_log_ratio_of_100_in_float32",
    "overflow_f32/torchtune.*": "NaN from a masked place",
}


@pytest.mark.parametrize(("case", "key"), outputs("policy_loss.json", NOT_POLICY))
def test_golden_policy(case, key):
    check(case, key, POLICY)


# value_loss.json --------------------------------------------------------------------------------------------
def value(next_place=False, **options):
    def loss(x, c):
        return value_loss(
            x, c.old_values, c.returns, next_token_mask(c.mask) if next_place else c.mask, **options
        )

    return loss


VALUE_LOSSES = {
    "dschat.critic_loss_fn": value(clip=0.2),
    "openrlhf.ValueLoss.clipNone": value(),
    "openrlhf.ValueLoss.clip0.2": value(clip=0.2),
    "openrlhf.ValueLoss.clip0.5": value(clip=0.5),
    "openrlhf.ValueLoss.clip0.2.seqmean": value(clip=0.2, agg=SEQUENCE),
    "verl.compute_value_loss.token-mean": value(clip=0.2),
    "verl.compute_value_loss.seq-mean-token-mean": value(clip=0.2, agg=SEQUENCE),
    "trlx.vf_loss": value(clip=0.2),
    "seed_a.compute_value_loss": value(half=False, agg=SEQUENCE),
    "trl.vf_loss": value(clip=0.2, next_place=True),
}


def value_targets():
    targets = {}
    for key, loss in VALUE_LOSSES.items():
        targets[key] = lambda c, f=loss, k=key: tolerant(k, f(c.values, c)[0])
        targets[f"{key}.grad"] = lambda c, f=loss, k=key: tolerant(
            k, (lambda x: gradient(f(x, c)[0], x))(leaf(c.values))
        )
    for agg in ("token-mean", "seq-mean-token-mean"):
        key = f"verl.compute_value_loss.{agg}"
        targets[f"{key}.clipfrac"] = lambda c, f=VALUE_LOSSES[key]: Close(
            number(f(c.values, c)[1]["value/clipfrac"]), 1e-9, "verl divides by n + 1e-8"
        )
    return targets


VALUE = value_targets()


@pytest.mark.parametrize(("case", "key"), outputs("value_loss.json"))
def test_golden_value(case, key):
    check(case, key, VALUE)


# aggregation.json -------------------------------------------------------------------------------------------
MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": TOKEN_SUM,
    "seq-mean-token-mean": SEQUENCE,
    "seq-mean-token-sum-norm": NORM,
}


def totals_of(c):
    """Returns the totals over all ranks, summed over the shards."""
    masks = [c.mask[rows] for rank in c.shards.values() for rows in rank]
    return batch_totals(masks, dp_size=c.params["dp_size"], norm=c.params["norm"])


def sharded(mode, rank):
    return lambda c: [aggregate(c.loss[rows], c.mask[rows], mode, totals_of(c)) for rows in c.shards[rank]]


def sharded_total(mode):
    """Sums over micro-batches and averages over ranks."""
    return lambda c: sum(sum(sharded(mode, rank)(c)) for rank in c.shards) / len(c.shards)


AGGREGATION = {
    **{
        f"verl.agg_loss.{name}": (lambda c, m=mode: aggregate(c.loss, c.mask, m))
        for name, mode in MODES.items()
    },
    **{
        f"verl.sharded.{name}.{rank}": sharded(mode, rank)
        for name, mode in MODES.items()
        if mode != NORM
        for rank in ("rank0", "rank1")
    },
    **{f"verl.sharded_total.{name}": sharded_total(mode) for name, mode in MODES.items() if mode != NORM},
    "openrlhf.aggregate_loss.token": lambda c: aggregate(c.loss, c.mask),
    "openrlhf.aggregate_loss.seq": lambda c: aggregate(c.loss, c.mask, SEQUENCE),
    "openrlhf.sharded_total.token": sharded_total("token_mean"),
    "openrlhf.sharded_total.seq": sharded_total(SEQUENCE),
}
NOT_AGGREGATION = {
    "verl.sharded*.seq-mean-token-sum-norm*": (
        "forgets dp_size: half of the whole batch's number; see tests/ops/test_properties.py"
    ),
    "naive_mean_of_means": "the usual mistake",
}


@pytest.mark.parametrize(("case", "key"), outputs("aggregation.json", NOT_AGGREGATION))
def test_golden_aggregation(case, key):
    check(case, key, AGGREGATION)


def test_every_table_entry_is_used():
    grads = [f"{k}.{m}" for k in LOSSES for m in ["grad", *METRICS]]  # a peer provides some of these
    without_loss = ["torchtune.PPOLoss.policy"]
    assert_no_stale_entries(
        "policy_loss.json", {k: 0 for k in POLICY if k not in grads + without_loss}, NOT_POLICY
    )
    assert_no_stale_entries("value_loss.json", VALUE)
    assert_no_stale_entries("aggregation.json", AGGREGATION, NOT_AGGREGATION)


# aggregation, worked by hand --------------------------------------------------------------------------------


# policy, worked by hand -------------------------------------------------------------------------------------


def test_only_the_policy_and_the_values_get_gradients():
    x = {
        name: leaf(torch.randn(2, 3))
        for name in ("new", "old", "advantages", "weights", "values", "old_values", "returns")
    }
    mask = torch.ones(2, 3)
    loss = policy_loss(x["new"], x["old"], x["advantages"], mask, is_weights=x["weights"])[0]
    loss = (
        loss
        + value_loss(x["values"], x["old_values"], x["returns"], mask, clip=0.2)[0]
        + kl_loss(x["new"], x["old"], mask)
    )
    loss.backward()
    assert {name for name, tensor in x.items() if tensor.grad is not None} == {"new", "values"}


def test_a_log_ratio_of_100_in_float32():
    """Without the clamp the gradient is 0 * inf = NaN although the loss is finite."""
    x = leaf(torch.tensor([[-1.0, -100.9, -101.1, -1.0]]))
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss, _ = policy_loss(x, torch.full((1, 4), -101.0), advantages, torch.tensor([[1, 1, 1, 0]]))
    expected = torch.tensor([[0.0, -math.exp(0.1) / 3, math.exp(-0.1) / 3, 0.0]])
    torch.testing.assert_close(gradient(loss, x), expected, rtol=2e-5, atol=0)


# value, entropy, KL, worked by hand -------------------------------------------------------------------------


# metrics ----------------------------------------------------------------------------------------------------
def batch(rows=6, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, old, advantages, values, returns = torch.randn(
        5, rows, width, generator=generator, dtype=torch.float64
    )
    mask = torch.arange(width) < torch.tensor([5, 1, 3, 0, 4, 2])[:rows, None]
    return {
        "x": x,
        "old": x + 0.3 * old,
        "advantages": advantages,
        "values": values,
        "returns": returns,
        "mask": mask,
    }


def metrics_of(b, **options):
    policy = policy_loss(b["x"], b["old"], b["advantages"], b["mask"], dual_clip=1.1, **options)
    value = value_loss(b["values"], b["values"] + 0.1, b["returns"], b["mask"], clip=0.05, **options)
    return (policy[0], value[0]), policy[1] | value[1]


def test_metrics_are_masked_sums_with_counts():
    b = batch()
    keep = b["mask"]
    _, metrics = metrics_of(b)
    ratio = (b["x"] - b["old"]).exp()[keep]
    for name, expected in {
        "policy/ratio_mean": ratio.mean(),
        "policy/kl_k1": (b["old"] - b["x"])[keep].mean(),
        "policy/approx_kl": (ratio - 1 - ratio.log()).mean(),
        "value/mean": b["values"][keep].mean(),
    }.items():
        assert metrics[name].shape == (2,) and metrics[name][1] == keep.sum()
        torch.testing.assert_close(number(metrics[name]), expected)
    assert metrics["policy/ratio_max"] == ratio.max()
    returns, errors = b["returns"][keep], (b["returns"] - b["values"])[keep]
    assert explained_variance(metrics["value/explained_var"]) == pytest.approx(
        (1 - errors.var() / returns.var()).item()
    )
    assert set(metrics) == {
        *(
            f"policy/{n}"
            for n in ("loss", "clipfrac", "clipfrac_low", "approx_kl", "kl_k1", "ratio_mean", "ratio_max")
        ),
        *(f"value/{n}" for n in ("loss", "clipfrac", "explained_var", "mean")),
    }


@pytest.mark.parametrize("mode", ["token_mean", SEQUENCE, TOKEN_SUM, NORM])
def test_metrics_add_up_over_micro_batches(mode):
    """Summed over micro-batches, numerators and divisors give the loss of the whole step, in every mode."""
    b = batch()
    totals = batch_totals([b["mask"]], norm=7.0)
    parts = [
        metrics_of({k: v[rows] for k, v in b.items()}, agg=mode, totals=totals)
        for rows in ([0, 3], [1, 2, 4], [5])
    ]
    losses, whole = metrics_of(b, agg=mode, totals=totals)
    for name, x in whole.items():
        pieces = torch.stack([metrics[name] for _, metrics in parts])
        torch.testing.assert_close(pieces.sum(0) if x.dim() else pieces.max(), x)
    for name, loss in zip(("policy/loss", "value/loss"), losses, strict=True):
        torch.testing.assert_close(number(whole[name]), loss)


def test_metrics_carry_no_gradient_and_an_empty_batch_is_harmless():
    b = batch()
    b["x"], b["values"] = leaf(b["x"]), leaf(b["values"])
    assert not any(x.requires_grad for x in metrics_of(b)[1].values())
    b["mask"] = torch.zeros_like(b["mask"])
    (policy, value), metrics = metrics_of(b)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in metrics.values())
    assert explained_variance(metrics["value/explained_var"]) == 0.0
    assert policy.item() == value.item() == 0.0
