"""Tests whole systems: from log-probs, values and scores to losses and gradients."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ppo_ds.algorithm.credit.gae import compute_gae
from ppo_ds.algorithm.loss.aggregation import BatchTotals
from ppo_ds.ops.masked import masked_whiten
from ppo_ds.ops.sequences import next_token_mask
from tests.ops.by_name import (
    approx_kl,
    normalize_advantages,
    policy_loss,
    shape_scores,
    token_rewards,
    value_loss,
)
from tests.ops.golden import Close, Within, assert_no_stale_entries, check, gradient, leaf, outputs


@dataclass(frozen=True)
class Steps:
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    mask: Tensor  # mask of the policy loss
    value_mask: Tensor
    agg: str = "token_mean"
    half: bool = True
    dual_clip: float | None = None
    totals: BatchTotals | None = None
    rubbish_beyond: bool = False


def kl(c):
    return approx_kl(c.old_logprobs, c.ref_logprobs)


def gae(c, rewards, mask):
    return compute_gae(rewards, c.old_values, mask, c.params["gamma"], c.params["lam"])


def without_eos(c):
    """Returns the action mask of systems in which EOS is not an action, by rule or because pad == eos."""
    lengths = c.mask.sum(1) - torch.tensor(c.has_eos).long()
    return (torch.arange(c.mask.shape[1]) < lengths[:, None]).long()


def deepspeed_chat(mask):
    """Extends the action mask by one position, with KL, score, advantage and return, but without a loss."""

    def steps(c):
        m = mask(c)
        rewards = token_rewards(
            shape_scores(c.scores, clip=c.params["clip_reward"]),
            next_token_mask(m),
            kl(c),
            c.params["kl_coef"],
        )
        return Steps(rewards, *gae(c, rewards, next_token_mask(m)), m, m)

    return steps


def on_last_token(whiten, dual_clip=None):
    def steps(c):
        rewards = token_rewards(
            shape_scores(c.scores, clip=c.params.get("clip_reward")), c.mask, kl(c), c.params["kl_coef"]
        )
        advantages, returns = gae(c, rewards, c.mask)
        return Steps(
            rewards,
            whiten(advantages, c.mask),
            returns,
            c.mask,
            c.mask,
            dual_clip=dual_clip,
            rubbish_beyond=True,
        )

    return steps


def trl(c):
    """Puts the score one position after EOS; the value mask has one position more than the policy mask."""
    states = next_token_mask(c.mask)
    rewards = token_rewards(c.scores, c.mask, kl(c), c.params["kl_coef"], place="next_token")
    advantages, returns = gae(c, rewards, states)
    return Steps(rewards, masked_whiten(advantages, c.mask), returns, c.mask, states)


def torchtune(c):
    """Differs from TRL in that responses of one token have the score on this token.

    The extra position has a KL too, and whitening keeps the mean of the advantages.
    """
    states = torch.where(c.mask.sum(1, keepdim=True) > 1, next_token_mask(c.mask), c.mask)
    rewards = token_rewards(c.scores, states, kl(c), c.params["kl_coef"])
    rewards = rewards.where(c.mask.bool(), token_rewards(c.scores, states))
    advantages, returns = gae(c, rewards, states)
    return Steps(rewards, masked_whiten(advantages, c.mask, shift_mean=False), returns, c.mask, states)


def blog(eos_is_action):
    """Uses the mean over sequences of token means, and the squared error without the factor 1/2.

    If EOS is not in the mask, the score on EOS is lost.
    """

    def steps(c):
        scores = shape_scores(c.scores, clip=c.params["clip_reward"])
        mask = c.mask if eos_is_action else without_eos(c)
        place = "last_token" if eos_is_action else "next_token"
        rewards = token_rewards(scores, mask, kl(c), c.params["kl_coef"], place)
        # the mean over sequences includes responses without an action
        totals = BatchTotals(tokens=mask.sum().item(), sequences=len(mask))
        return Steps(
            rewards, *gae(c, rewards, mask), mask, mask, agg="seq_mean_token_mean", half=False, totals=totals
        )

    return steps


SYSTEMS = {
    "dschat_pad_not_eos": deepspeed_chat(lambda c: c.mask),
    "dschat_pad_is_eos": deepspeed_chat(without_eos),
    "openrlhf": on_last_token(normalize_advantages),
    "verl": on_last_token(masked_whiten, dual_clip=3.0),
    "trl": trl,
    "torchtune": torchtune,
    "seed_a_eos_dropped": blog(eos_is_action=False),
    "seed_a_eos_kept": blog(eos_is_action=True),
}


def losses(c, x, v):
    s = SYSTEMS[c.id](c)
    p = c.params
    common = {"agg": s.agg, "totals": s.totals}
    policy, _ = policy_loss(
        x, c.old_logprobs, s.advantages, s.mask, clip_low=p["clip"], dual_clip=s.dual_clip, **common
    )
    value, _ = value_loss(
        v, c.old_values, s.returns, s.value_mask, clip=p["clip_value"], half=s.half, **common
    )
    # the goldens of torchtune have the total in place of both losses
    total = policy + p["vf_coef"] * value if c.id == "torchtune" else None
    return (policy, value) if total is None else (total, total)


def close(c, x):
    if c.id == "openrlhf":
        return Close(x, 2e-5, "its KL is float32")
    return Close(x, 1e-7, "whitened, or divided by n + 1e-8")


def step(name):
    def of(c):
        s = SYSTEMS[c.id](c)
        x = getattr(s, name)
        return close(c, Within(x, s.mask) if s.rubbish_beyond else x)

    return of


def loss(which):
    return lambda c: close(c, losses(c, c.logprobs, c.values)[which])


def grad(which):
    def of(c):
        leaves = leaf(c.logprobs), leaf(c.values)
        return close(c, gradient(losses(c, *leaves)[which], leaves[which]))

    return of


TARGETS = {
    "rewards": step("rewards"),
    "advantages": step("advantages"),
    "returns": step("returns"),
    "loss_mask": lambda c: SYSTEMS[c.id](c).mask,
    "policy_loss": loss(0),
    "value_loss": loss(1),
    "policy_grad": grad(0),
    "value_grad": grad(1),
}


@pytest.mark.parametrize(("case", "key"), outputs("pipelines.json"))
def test_golden(case, key):
    check(case, key, TARGETS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("pipelines.json", TARGETS)
