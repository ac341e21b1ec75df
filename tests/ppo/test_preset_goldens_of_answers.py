"""Tests presets that treat a response as a whole: YAML file to numbers, as in test_preset_goldens.py.

All outputs of sequence_level.json and group_advantages.json are compared, except those that no preset offers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.golden import assert_no_stale_entries, cases, look_up, outputs
from tests.ppo.preset_runs import (
    NAN,
    WIDTH,
    Numbers,
    at_places,
    close,
    composed,
    gradient_of,
    loss_of,
    make_and_learn,
    ran,
    states,
    under,
)


# sequence_level.json
# ------------------------------------------------------------------------------------------------------------
def after_the_end(column, mask):
    """Places one value per response, [B], on the state after its last token; returns [B,S].

    All other states are NaN, so that reading them is noticed.
    """
    return torch.full((len(mask), WIDTH + 1), NAN, dtype=column.dtype).scatter(
        1, mask.long().sum(1, keepdim=True), column[:, None]
    )


def answers(case):
    # seed_c has no old values: with one pass, they equal the new values
    old_values = case.inputs.get("old_values", case.values)
    return Numbers(
        mask=case.mask,
        scores=case.scores,
        old=case.old_logprobs,
        ref=case.ref_logprobs,
        now=case.logprobs,
        old_values=after_the_end(old_values, case.mask),
        values=after_the_end(case.values, case.mask),
        aux=case.params.get("aux_loss"),
    )


LOOPS = {"seed_b": ("sequence_kl",), "seed_c": ("minimind",)}
BEFORE_THE_LOOP = (
    "the KL is computed once, before the updates: a constant, which holds nothing "
    "back. Deliberately not offered"
)
NOT_OFFERED = {"seed_b/*total_kl_before_loop": BEFORE_THE_LOOP}


def per_answer(x, mask):
    """Returns the value of each response, which all its tokens share."""
    assert (
        all(row[m].unique().numel() == 1 for row, m in zip(x, mask.bool(), strict=True))
        and not x[~mask.bool()].any()
    )
    return x[:, 0]


def at_the_end(x, mask):
    """Returns the value on the state after each response's last token; all other states must be 0."""
    ends = mask.long().sum(1, keepdim=True)
    assert not x.scatter(1, ends, 0.0).any()
    return x.gather(1, ends)[:, 0]


def summed(name):
    """Turns a metric's mean over tokens into the mean over responses of its sums over their tokens."""
    return lambda run, c: run.learned[name] * float(c.mask.sum()) / len(c.mask)


def total(run, c):
    """Adds the losses of actor and critic.

    MiniMind divides the loss by its 4 accumulation steps.
    """
    return (loss_of(run.actor) + loss_of(run.critic)) / c.params.get("accumulation_steps", 1)


def actor_gradient(run, c):
    return gradient_of(run.actor) / c.params.get("accumulation_steps", 1)


WHOLE = {
    "seed_b/advantages": lambda run, c: per_answer(run.experience.advantages, c.mask),
    "seed_c/advantages": lambda run, c: per_answer(run.experience.advantages, c.mask),
    "seed_b/returns": lambda run, c: at_the_end(run.experience.returns, c.mask),
    "seed_b/kl_before_loop": lambda run, c: (run.experience.logprobs - run.experience.ref_logprobs).sum(1),
    "policy_loss": lambda run, c: run.learned["policy/loss"],
    "value_loss": lambda run, c: run.learned["value/loss"],
    "seed_b/entropy": summed("policy/entropy"),
    "seed_b/entropy_loss": lambda run, c: -0.01 * summed("policy/entropy")(run, c),
    "seed_b/kl_live": summed("policy/kl_loss"),
    "seed_c/kl_ref": summed("policy/kl_loss"),
    "seed_c/kl": lambda run, c: -summed("policy/kl_k1")(run, c),  # seed_c's KL is new - old log-probs
    "seed_b/total_kl_live": total,
    "seed_c/total": total,
    "seed_b/grad_logprobs.total_kl_live": actor_gradient,
    "seed_c/grad_logprobs": actor_gradient,
    "grad_values": lambda run, c: (
        at_the_end(gradient_of(run.critic), c.mask) / c.params.get("accumulation_steps", 1)
    ),
}


def raw_advantages(world, c):
    return per_answer(
        ran(world, c, answers(c), "sequence_kl", "algo.advantage.whiten=none").experience.advantages, c.mask
    )


@pytest.mark.parametrize("case", cases("sequence_level.json"), ids=lambda c: c.id)
def test_the_golden_was_made_with_the_presets_own_parameters(case):
    algo = composed(*LOOPS[case.id]).algo
    ours = {
        "clip": algo.policy.clip_low,
        "vf_coef": algo.value.coef,
        "kl_coef": algo.kl.coef,
        "entropy_coef": algo.entropy.coef,
    }
    given = {
        name: value for name, value in case.params.items() if name not in ("aux_loss", "accumulation_steps")
    }
    assert given == {name: ours[name] for name in given} and (
        "entropy_coef" in given or not algo.entropy.coef
    )


@pytest.mark.parametrize(("case", "key"), outputs("sequence_level.json", NOT_OFFERED))
def test_sequence_level(world, case, key):
    golden = case.outputs[key]
    if key == "advantages_raw":
        return close(raw_advantages(world, case), golden)
    run = ran(world, case, answers(case), *LOOPS[case.id])
    assert len(run.actor.steps) == len(run.critic.steps) == {"seed_b": 4, "seed_c": 1}[case.id]
    # the old policy of seed_c's preset is a lagging copy
    assert (run.experience.logprobs == run.experience.old_logprobs).all() == (case.id == "seed_b")
    if key == "ratio":
        close(run.learned["policy/ratio_max"], golden.max())
        return close(run.learned["policy/ratio_mean"], (golden * case.mask.sum(1)).sum() / case.mask.sum())
    close(look_up(WHOLE, case, key)(run, case), golden)


# group_advantages.json
# ------------------------------------------------------------------------------------------------------------
def two_groups(case):
    """Makes the numbers of two groups; policy log-prob minus reference log-prob is the golden's KL."""
    assert case.index.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    ref = torch.full(case.kl.shape, -2.0, dtype=case.kl.dtype)
    values = states(case.values, case.mask)
    return Numbers(
        mask=case.mask,
        scores=case.scores,
        old=ref + case.kl,
        ref=ref,
        now=ref + case.kl,
        old_values=values,
        values=values,
    )


def run_of(world, case, *arguments):
    return ran(world, case, two_groups(case), *arguments, prompts=2, samples=4)


KL_0_1 = "algo.kl.coef=0.1"  # the golden's coefficient
RAW = "algo.advantage.whiten=none"
# A run without a critic has no returns. verl's "returns" are its advantages unless a comment says otherwise.
GROUPS = {
    "verl.grpo.advantages": ("grpo",),
    "verl.grpo.returns": ("grpo",),
    "verl.grpo_vectorized.*": ("grpo",),
    "verl.dr_grpo.*": ("dr_grpo",),
    "verl.rloo.advantages": ("rloo", "algo.kl.coef=0"),
    "verl.rloo.returns": ("rloo", "algo.kl.coef=0"),
    "verl.rloo_vectorized.*": ("rloo", "algo.kl.coef=0"),
    "verl.opo.*": ("grpo", "algo.advantage.estimator=opo"),
    "verl.gpg.*": ("dr_grpo",),  # GPG's factor, the number of responses over those with a score, is 1 here
    "verl.reinforce_pp_baseline.*": ("reinforce_pp_baseline", "algo.advantage.unbiased=true"),
    "verl.reinforce_pp.advantages": ("reinforce_pp", KL_0_1),
    "verl.reinforce_pp.returns": ("reinforce_pp", KL_0_1, RAW),  # these returns are the rewards-to-go
    "openrlhf.reinforce.advantages": ("reinforce_pp", KL_0_1, "algo.advantage.unbiased=false"),
    "openrlhf.reinforce*.returns": ("reinforce_pp", KL_0_1, RAW),
    "openrlhf.gae.advantages": ("openrlhf", KL_0_1, "algo.gae.lam=0.95"),
    "openrlhf.gae*.returns": ("openrlhf", KL_0_1, "algo.gae.lam=0.95"),
}
KL_APART = (
    "the group's baseline for the score alone, the KL of each token to its own "
    "future: ours takes the answer's whole KL off the score first"
)
NOT_GROUPS = {
    "verl.grpo_passk.*": "pass@k: an advantage for the best of a group alone; no estimator here",
    "verl.remax.*": "has one prompt per response, see test_remax_subtracts_the_score_of_a_greedy_response",
    "verl.*.singletons": (
        "a prompt with one answer has no baseline: refused, see test_groups_of_one_are_refused"
    ),
    "openrlhf.*.no_std.advantages": (
        "advantages less their mean, not over their deviation: no kind of algo.advantage.whiten"
    ),
    "openrlhf.reinforce_baseline*": KL_APART,
    "openrlhf.rloo.*": KL_APART,
    "openrlhf.group_norm.*": KL_APART,
    "openrlhf.dr_grpo.*": KL_APART,
}


@pytest.mark.parametrize(("case", "key"), outputs("group_advantages.json", NOT_GROUPS))
def test_groups(world, case, key):
    run = run_of(world, case, *look_up(GROUPS, case, key))
    values = key.startswith("openrlhf.gae") and key.endswith("returns")
    actual = at_places(run.experience.returns) if values else run.experience.advantages
    close(under(case.mask, actual), case.outputs[key][case.mask.bool()])


def test_remax_subtracts_the_score_of_a_greedy_response(world):
    (case,) = cases("group_advantages.json")
    given = replace(two_groups(case), baselines=case.reward_baselines)
    run = make_and_learn(composed("remax", "algo.kl.coef=0", prompts=8), world, given)
    golden = case.outputs["verl.remax.advantages"]
    close(under(case.mask, run.experience.advantages), golden[case.mask.bool()])
    close(run.seen["reward/baseline_mean"], case.reward_baselines.mean())


def test_every_table_entry_is_used():
    assert_no_stale_entries("sequence_level.json", WHOLE, NOT_OFFERED)
    assert_no_stale_entries("group_advantages.json", GROUPS, NOT_GROUPS)
