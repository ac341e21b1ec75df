"""Tests that presets give the numbers of the systems they are named after.

The presets are read from their YAML files and run by the trainer's own ExperienceMaker and Learner. The
trainer works in float32 and in micro-batches, and the goldens are float64, so the relative and absolute
tolerances are 2e-5 (preset_runs.close). Every output of a golden file is compared, except those in
NOT_OFFERED. Where a preset departs from its system on purpose, ``expected`` corrects this one term of the
golden by hand. Responses as single actions and groups are tested in test_preset_goldens_of_answers.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops.golden import assert_no_stale_entries, cases, outputs
from tests.ppo.preset_runs import (
    WIDTH,
    Numbers,
    at_places,
    close,
    composed,
    gradient_of,
    loss_of,
    ran,
    states,
    under,
)

# pipelines.json
# ------------------------------------------------------------------------------------------------------------
# The goldens of the tutorial have a wide clip, which changes no score, and one minibatch.
ZYSNLP_GOLDEN = ("algo.reward_shaping.clip=5", "algo.minibatch_size=null")
SYSTEMS = {
    "dschat_pad_not_eos": ("deepspeed_chat",),
    "dschat_pad_is_eos": ("deepspeed_chat",),
    "openrlhf": ("openrlhf",),
    "verl": ("verl",),
    "trl": ("trl",),
    "seed_a_eos_dropped": ("zysnlp_strict", *ZYSNLP_GOLDEN),
    "seed_a_eos_kept": ("zysnlp", "algo.train_on_eos=true", *ZYSNLP_GOLDEN),
}
NOT_OFFERED = {
    "torchtune/*": (
        "no preset: its advantages keep their mean, the place after the end has KL, "
        "one-token answers are paid elsewhere"
    ),
    "dschat_pad_not_eos/policy_*": "of advantages with a KL on a PAD; dschat_pad_is_eos has the losses",
    "dschat_pad_not_eos/value_*": "of returns with a KL on a PAD; dschat_pad_is_eos has the losses",
}
PARAMETERS = {
    "kl_coef": lambda algo: algo.kl.coef,
    "clip_reward": lambda algo: algo.reward_shaping.clip,
    "gamma": lambda algo: algo.gae.gamma,
    "lam": lambda algo: algo.gae.lam,
    "clip": lambda algo: algo.policy.clip_low,
    "clip_value": lambda algo: algo.value.clip,
    "dual_clip_c": lambda algo: algo.policy.dual_clip,
}
OFFERED = {case.id: case for case in cases("pipelines.json") if case.id in SYSTEMS}
of_each_system = pytest.mark.parametrize("case", OFFERED.values(), ids=OFFERED)


@of_each_system
def test_the_golden_was_made_with_the_presets_own_parameters(case):
    algo = composed(*SYSTEMS[case.id]).algo
    assert {name: PARAMETERS[name](algo) for name in case.params} == case.params


def dialogue(case):
    return Numbers(
        mask=case.mask,
        scores=case.scores,
        old=case.old_logprobs,
        ref=case.ref_logprobs,
        now=case.logprobs,
        old_values=states(case.old_values, case.mask),
        values=states(case.values, case.mask),
        finished=torch.tensor(case.has_eos),
        pad_id=2 if case.id == "dschat_pad_is_eos" else 0,  # 2 is the end token
    )


def run_of(world, case, *arguments):
    return ran(world, case, dialogue(case), *(arguments or SYSTEMS[case.id]))


ACTUAL = {
    "rewards": lambda run: at_places(run.experience.rewards),
    "advantages": lambda run: run.experience.advantages,
    "returns": lambda run: at_places(run.experience.returns),
    "loss_mask": lambda run: run.experience.response_mask,
    "policy_loss": lambda run: loss_of(run.actor),
    "value_loss": lambda run: loss_of(run.critic),
    "policy_grad": lambda run: gradient_of(run.actor),
    "value_grad": lambda run: at_places(gradient_of(run.critic)),
}
RUBBISH_BEYOND = ("openrlhf", "verl")  # outputs beyond a response have no meaning


def expected(case, key):
    """Returns the golden's output as the preset should give it."""
    x = case.outputs[key]
    if case.id == "trl" and key.startswith("value_"):
        return 0.1 * x  # the golden does not include vf_coef
    if case.id == "seed_a_eos_dropped" and key.endswith(("_loss", "_grad")):
        # row 1 has no action: the tutorial's mean includes its 0 among 6 numbers, ours is over 5 numbers
        return 6 / 5 * x
    if case.id == "dschat_pad_not_eos":
        return without_kl_on_pad(case)[key]
    return x


def without_kl_on_pad(case):
    """Undoes DeepSpeed-Chat's KL on the PAD token after the end, which is not an action.

    It lowered the reward after the n actions by 0.1 * kl, and each earlier advantage and return by 0.95 times
    as much as the next one.
    """
    p, out = case.params, {name: case.outputs[name].clone() for name in ("rewards", "advantages", "returns")}
    for i, n in enumerate(case.mask.sum(1).tolist()):
        if n < WIDTH:
            back = p["kl_coef"] * float(case.old_logprobs[i, n] - case.ref_logprobs[i, n])
            out["rewards"][i, n] += back
            for t in range(n + 1):
                out["advantages"][i, t] += back * p["lam"] ** (n - t)
                out["returns"][i, t] += back * p["lam"] ** (n - t)
    return case.outputs | out


@pytest.mark.parametrize(("case", "key"), outputs("pipelines.json", NOT_OFFERED))
def test_pipelines(world, case, key):
    actual, golden = ACTUAL[key](run_of(world, case)), expected(case, key)
    if key == "advantages" or (case.id in RUBBISH_BEYOND and key in ("rewards", "returns")):
        # DeepSpeed-Chat also computes an advantage after the end, but does not use it
        actions = case.outputs["loss_mask"].bool()
        actual, golden = under(actions, actual), golden[actions]
    close(actual, golden)


def test_every_table_entry_is_used():
    assert_no_stale_entries("pipelines.json", ACTUAL, NOT_OFFERED)


# one state more than tokens, except in rows 0 and 5, which reach their limit
ONE_MORE = torch.arange(WIDTH + 1) < torch.tensor([[10], [2], [8], [5], [10], [10]])


@of_each_system
def test_passes_and_states(world, case):
    run = run_of(world, case)
    assert len(run.actor.steps) == len(run.critic.steps) == run.config.algo.epochs
    actions = torch.nn.functional.pad(case.outputs["loss_mask"].bool(), (0, 1))
    assert torch.equal(run.experience.value_mask, ONE_MORE if case.id == "trl" else actions)
    places, lengths = torch.arange(WIDTH + 1), case.mask.sum(1, keepdim=True)
    answered = places[:-1] < lengths
    assert torch.equal(run.experience.values[:, :-1][answered], case.old_values.float()[answered])
    assert not run.experience.values[places > lengths].any()  # critic outputs of padding are not kept
