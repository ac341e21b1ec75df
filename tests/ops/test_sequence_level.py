"""Tests one ratio per response: two published loops that treat the whole response as one action."""

import math

import pytest
import torch

from ppo_ds.ops.logprobs import sequence_logprobs
from ppo_ds.ops.masked import masked_whiten
from tests.ops.by_name import entropy_loss, kl_loss, one_step_advantages, policy_loss, value_loss
from tests.ops.golden import Close, assert_no_stale_entries, check, gradient, leaf, outputs

PER_SEQUENCE = "seq_mean_token_mean"


def ratio(c):
    return (sequence_logprobs(c.logprobs, c.mask) - sequence_logprobs(c.old_logprobs, c.mask)).exp()


def policy(x, c, advantages):
    options = {"ratio": "sequence", "log_ratio_clamp": math.inf, "agg": PER_SEQUENCE}
    return policy_loss(x, c.old_logprobs, advantages, c.mask, clip_low=c.params["clip"], **options)[0]


def value(v, c):
    """Computes the loss of one value per response, as rows of one position."""
    v, returns, ones = v[:, None], c.scores[:, None], torch.ones(len(v), 1)
    return value_loss(v, v, returns, ones, half=False)[0]


def kl(x, other, c):
    return kl_loss(x, other, c.mask, "k1", agg="seq_mean_token_sum")


def close(x):
    return Close(x, 1e-7, "whitened; sequence means divide by n + 1e-8")


def b_advantages(c, whiten=True):
    advantages, _ = one_step_advantages(c.scores, c.old_values)
    return masked_whiten(advantages, torch.ones_like(advantages)) if whiten else advantages


def b_entropy(x, c):
    return entropy_loss(-x, c.mask, agg="seq_mean_token_sum")  # -log p of the sample is the entropy estimate


def kl_before_loop(c):
    return sequence_logprobs(c.old_logprobs, c.mask) - sequence_logprobs(c.ref_logprobs, c.mask)


def b_total(x, v, c, live):
    p = c.params
    penalty = kl(x, c.ref_logprobs, c) if live else kl_before_loop(c).mean()
    loss = policy(x, c, b_advantages(c)) + p["vf_coef"] * value(v, c)
    return loss - p["entropy_coef"] * b_entropy(x, c) + p["kl_coef"] * penalty


def c_total(x, v, c):
    p = c.params
    advantages, _ = one_step_advantages(c.scores, c.values)
    loss = policy(x, c, advantages) + p["vf_coef"] * value(v, c) + p["kl_coef"] * kl(x, c.ref_logprobs, c)
    return (loss + p["aux_loss"]) / p["accumulation_steps"]


def grad_of(function, of):
    def grad(c):
        x, v = leaf(c.logprobs), leaf(c.values)
        return close(gradient(function(x, v, c), {"logprobs": x, "values": v}[of]))

    return grad


TARGETS = {
    "ratio": ratio,
    "value_loss": lambda c: value(c.values, c),
    "seed_b/advantages_raw": lambda c: b_advantages(c, whiten=False),
    "seed_b/advantages": lambda c: close(b_advantages(c)),
    "seed_b/returns": lambda c: one_step_advantages(c.scores, c.old_values)[1],
    "seed_b/policy_loss": lambda c: close(policy(c.logprobs, c, b_advantages(c))),
    "seed_b/entropy": lambda c: b_entropy(c.logprobs, c),
    "seed_b/entropy_loss": lambda c: -c.params["entropy_coef"] * b_entropy(c.logprobs, c),
    "seed_b/kl_live": lambda c: kl(c.logprobs, c.ref_logprobs, c),
    "seed_b/kl_before_loop": kl_before_loop,
    "seed_b/total_kl_live": lambda c: close(b_total(c.logprobs, c.values, c, live=True)),
    "seed_b/total_kl_before_loop": lambda c: close(b_total(c.logprobs, c.values, c, live=False)),
    "seed_b/grad_logprobs.total_kl_live": grad_of(lambda x, v, c: b_total(x, v, c, live=True), "logprobs"),
    "seed_b/grad_logprobs.total_kl_before_loop": grad_of(
        lambda x, v, c: b_total(x, v, c, live=False), "logprobs"
    ),
    "seed_b/grad_values": grad_of(lambda x, v, c: b_total(x, v, c, live=True), "values"),
    "seed_c/advantages": lambda c: one_step_advantages(c.scores, c.values)[0],
    "seed_c/policy_loss": lambda c: close(policy(c.logprobs, c, one_step_advantages(c.scores, c.values)[0])),
    "seed_c/kl": lambda c: kl(c.logprobs, c.old_logprobs, c),
    "seed_c/kl_ref": lambda c: kl(c.logprobs, c.ref_logprobs, c),
    "seed_c/total": lambda c: close(c_total(c.logprobs, c.values, c)),
    "seed_c/grad_logprobs": grad_of(c_total, "logprobs"),
    "seed_c/grad_values": grad_of(c_total, "values"),
}


@pytest.mark.parametrize(("case", "key"), outputs("sequence_level.json"))
def test_golden(case, key):
    check(case, key, TARGETS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("sequence_level.json", TARGETS)
