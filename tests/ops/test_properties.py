"""Tests properties that hold for any input: invariances, limits, and the gradients of autograd."""

import itertools

import pytest
import torch

from ppo_ds.algorithm.credit.gae import compute_gae
from ppo_ds.algorithm.credit.returns import discounted_sum
from ppo_ds.algorithm.loss.aggregation import batch_totals
from ppo_ds.algorithm.policy.keys import POLICY_LOSSES
from ppo_ds.ops.masked import masked_mean, masked_whiten
from tests.ops.by_name import (
    aggregate,
    approx_kl,
    entropy_loss,
    kl_loss,
    normalize_advantages,
    on_ranks,
    policy_loss,
    reinforce_pp_advantages,
    rollout_is_weights,
    token_rewards,
    value_loss,
)
from tests.ops.golden import gradient, leaf

SEEDS = range(3)
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_norm"]
KINDS = [
    *({"kind": name} for name in POLICY_LOSSES),
    {"dual_clip": 1.5},
    {"ratio": "sequence"},
    {"kind": "sapo", "ratio": "sequence"},
]
ESTIMATORS = ["k1", "abs", "k2", "k3", "k1+", "k3+"]
NAN, INF = float("nan"), float("inf")


def any_policy_loss(logprobs, old, advantages, mask, kind="ppo", **options):
    """Computes the loss of an entry of KINDS; a loss with a selection of tokens gets an empty one."""
    selected = torch.zeros(mask.shape, dtype=torch.bool) if POLICY_LOSSES[kind].selection else None
    return policy_loss(logprobs, old, advantages, mask, kind=kind, selected=selected, **options)


def batch(seed=0, rows=8, width=7, dtype=torch.float64, empty=True, holes=False):
    """Makes a rollout of varied lengths, including one token, the full width and, with ``empty``, 0."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(8, rows, width, generator=generator, dtype=torch.float64).to(dtype)
    names = ["logprobs", "old", "ref", "rollout", "advantages", "values", "old_values", "returns"]
    b = dict(zip(names, draw, strict=True))
    b["old"], b["rollout"] = b["logprobs"] + 0.3 * b["old"], b["logprobs"] + 0.1 * b["rollout"]
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[:3] = torch.tensor([0 if empty else 2, 1, width])
    b["mask"] = torch.arange(width) < lengths[:, None]
    if holes:
        b["mask"] &= torch.rand(rows, width, generator=generator) < 0.7
    b["scores"] = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)
    return b


def losses(b, agg="token_mean", totals=None):
    """Returns every loss of a batch as a dict."""
    common = {"agg": agg, "totals": totals}
    weights = rollout_is_weights(b["old"], b["rollout"], b["mask"], "tis", 0.8, 1.2)
    args = b["logprobs"], b["old"], b["advantages"], b["mask"]
    out = {str(k): any_policy_loss(*args, **k, **common)[0] for k in KINDS}
    out["weighted"] = policy_loss(*args, is_weights=weights, **common)[0]
    out["value"] = value_loss(b["values"], b["old_values"], b["returns"], b["mask"], clip=0.2, **common)[0]
    out["entropy"] = entropy_loss(-b["logprobs"], b["mask"], **common)
    out |= {e: kl_loss(b["logprobs"], b["ref"], b["mask"], e, **common) for e in ESTIMATORS}
    return out


def per_token(b):
    """Returns every [B,T] quantity from which the losses are computed, as a dict."""
    mask = b["mask"]
    rewards = token_rewards(b["scores"], mask, approx_kl(b["old"], b["ref"]), 0.1)
    advantages, returns = compute_gae(rewards, b["values"], mask, 0.9, 0.8)
    return {
        "rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "discounted": discounted_sum(b["returns"], mask, 0.9),
        "whitened": masked_whiten(b["advantages"], mask),
        "normalized": normalize_advantages(b["advantages"], mask),
        "reinforce_pp": reinforce_pp_advantages(rewards, mask, 0.9)[0],
        "is_weights": rollout_is_weights(b["old"], b["rollout"], mask, "seq_mask_tis", 0.5, 2.0),
    }


def select(b, rows):
    return {k: v[rows] for k, v in b.items()}


def with_padding(b, rubbish, extra):
    """Returns the batch with ``rubbish`` where the mask is 0, and ``extra`` positions of it appended."""
    padded = {}
    for name, x in b.items():
        if name in ("mask", "scores"):
            padded[name] = torch.nn.functional.pad(x, (0, extra)) if name == "mask" else x
            continue
        padded[name] = torch.nn.functional.pad(x.where(b["mask"], rubbish), (0, extra), value=rubbish)
    return padded


def assert_equal(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rubbish", [7.0, 1e30, NAN, INF, -INF])
@pytest.mark.parametrize("holes", [False, True])
def test_padding_invariance(rubbish, holes):
    """Values in the padding and a wider T change no number or gradient; both are 0 outside the mask."""
    b = batch(holes=holes)
    other = with_padding(b, rubbish, extra=3)
    expected = per_token(b)
    for name, x in per_token(other).items():
        assert_equal(x, torch.nn.functional.pad(expected[name], (0, 3)))
        assert torch.equal(x[~other["mask"]], torch.zeros_like(x[~other["mask"]])), name
    totals = batch_totals([b["mask"]], norm=5.0)
    for agg, wrt in itertools.product(MODES, ("logprobs", "values")):
        x, y = leaf(b[wrt]), leaf(other[wrt])
        expected, actual = losses(b | {wrt: x}, agg, totals), losses(other | {wrt: y}, agg, totals)
        for name, loss in expected.items():
            assert_equal(actual[name], loss)
            if loss.requires_grad:
                assert_equal(gradient(actual[name], y), torch.nn.functional.pad(gradient(loss, x), (0, 3)))


@pytest.mark.parametrize("agg", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_shard_invariance(agg, seed):
    """Any split of the rows over ranks and micro-batches gives the same gradient.

    Gradients are summed over micro-batches and averaged over ranks.
    """
    b = batch(seed)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    whole_totals = batch_totals([b["mask"]], norm=11.0)
    for split in ([[8]], [[3, 1], [2, 2]], [[1, 1, 1], [5]], [[0, 4], [4]]):
        sizes = iter(order.split([n for rank in split for n in rank]))
        ranks = [[next(sizes) for _ in rank] for rank in split]
        masks = [[b["mask"][rows] for rows in rank] for rank in ranks]
        totals = on_ranks(
            len(ranks), lambda r, reduce, m=masks: batch_totals(m[r], reduce, dp_size=len(m), norm=11.0)
        )
        assert all(t == totals[0] for t in totals) and totals[0].tokens == whole_totals.tokens
        filled = [rows for rank in ranks for rows in rank if len(rows)]
        for wrt in ("logprobs", "values"):
            x, y = leaf(b[wrt]), leaf(b[wrt])
            whole = losses(b | {wrt: x}, agg, whole_totals)
            parts = [losses(select(b | {wrt: y}, rows), agg, totals[0]) for rows in filled]
            for name, loss in whole.items():
                sharded = sum(part[name] for part in parts) / len(ranks)
                assert_equal(sharded, loss)
                if loss.requires_grad:
                    assert_equal(gradient(sharded, y), gradient(loss, x))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("agg", MODES)
def test_ratio_1_gives_the_policy_gradient(kind, agg):
    """On fresh samples every objective has the gradient of REINFORCE.

    With one ratio per response, it is the gradient for the responses' sums or means.
    """
    b = batch()
    x = leaf(b["logprobs"])
    loss, metrics = any_policy_loss(x, b["logprobs"], b["advantages"], b["mask"], agg=agg, **kind)
    grad = gradient(loss, x)
    y = leaf(b["logprobs"])
    signal = b["advantages"].masked_fill(~b["mask"], 0.0)
    if kind.get("ratio") == "sequence":
        signal = signal.sum(1, keepdim=True).expand_as(signal)
    if POLICY_LOSSES[kind.get("kind", "ppo")].response_ratio:
        signal = masked_mean(signal, b["mask"], dim=1)[:, None].expand_as(signal)
    assert_equal(grad, gradient(aggregate(-signal * y, b["mask"], agg), y))
    if kind.get("kind", "ppo") == "ppo":
        assert_equal(loss, aggregate(-b["advantages"], b["mask"], agg))
    assert metrics["policy/clipfrac"][0] == 0 and metrics["policy/ratio_max"] == 1
    assert metrics["policy/approx_kl"][0] == 0 and metrics["policy/kl_k1"][0] == 0


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_recursion_is_the_definition(seed, holes):
    """Checks A_t = sum_k (gamma lambda)^k delta_{t+k} over positions with mask = 1, with bootstrapping."""
    b, gamma, lam = batch(seed, holes=holes), 0.9, 0.8
    advantages, returns = compute_gae(
        b["returns"], b["values"], b["mask"], gamma, lam, bootstrap_value=b["scores"]
    )
    discounted = discounted_sum(b["returns"], b["mask"], gamma)
    for row in range(len(b["mask"])):
        places = b["mask"][row].nonzero()[:, 0]
        r, v = (
            b["returns"][row, places].tolist(),
            [*b["values"][row, places].tolist(), b["scores"][row].item()],
        )
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
        for i, t in enumerate(places.tolist()):
            advantage = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(r)))
            assert advantages[row, t].item() == pytest.approx(advantage, abs=1e-12)
            assert returns[row, t].item() == pytest.approx(advantage + v[i], abs=1e-12)
            assert discounted[row, t].item() == pytest.approx(
                sum(gamma ** (j - i) * r[j] for j in range(i, len(r))), abs=1e-12
            )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_float32_stays_finite_for_extreme_ratios(kind):
    """Uses log-ratios of +-1e4 and both signs of the advantage."""
    d = torch.tensor([1e4, 1e2, 20.0, 1.0, 0.0, -1.0, -20.0, -1e2, -1e4])
    old = torch.full((2, 9), -1.0)
    x = leaf(old + d)
    loss, metrics = any_policy_loss(x, old, torch.tensor([1.0, -1.0]), torch.ones(2, 9), **kind)
    assert loss.isfinite() and gradient(loss, x).isfinite().all()
    assert all(m.isfinite().all() for m in metrics.values())
    for estimator in ESTIMATORS:
        x = leaf(old + d)
        loss = kl_loss(x, old, torch.ones(2, 9), estimator)
        assert loss.isfinite() and gradient(loss, x).isfinite().all(), estimator
    weights = [
        rollout_is_weights(old + d, old, torch.ones(2, 9), k, 0.5, 2.0, level)
        for k in ("tis", "icepop", "seq_mask_tis", "truncate", "mask")
        for level in ("token", "sequence", "sequence_mean")
    ]
    assert all(w.isfinite().all() for w in weights)


@pytest.mark.parametrize("rubbish", [0.0, NAN, INF])
@pytest.mark.parametrize("agg", MODES)
def test_empty_rows_have_no_weight(agg, rubbish):
    """The losses are the same with and without an empty row.

    A batch of only empty rows has loss 0 and zero gradients.
    """
    b = with_padding(batch(), rubbish, extra=0)
    totals = batch_totals([b["mask"]], norm=5.0)
    assert totals.sequences == 7
    for name, loss in losses(b, agg, totals).items():
        assert_equal(losses(select(b, slice(1, None)), agg, totals)[name], loss)
    none = b | {"mask": torch.zeros_like(b["mask"])}
    for wrt in ("logprobs", "values"):
        x = leaf(none[wrt])
        for loss in losses(none | {wrt: x}, agg, totals).values():
            assert loss.item() == 0.0
            if loss.requires_grad:
                assert torch.equal(gradient(loss, x), torch.zeros_like(x))
    assert all(torch.equal(x, torch.zeros_like(x)) for x in per_token(none).values())
