"""Tests that presets give the numbers of the systems they are named after.

The presets are read from their YAML files and run by the trainer's own ExperienceMaker and Learner. The
trainer works in float32 and in micro-batches, and the goldens are float64, so the relative and absolute
tolerances are 2e-5 (preset_runs.close). Every output of a golden file is compared, except those in
NOT_OFFERED. Where a preset departs from its system on purpose, ``expected`` corrects this one term of the
golden by hand. Responses as single actions and groups are tested in test_preset_goldens_of_answers.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ppo_ds.config.warnings import warnings
from tests.ops.golden import assert_no_stale_entries, cases, outputs
from tests.ppo import preset_loops as loops
from tests.ppo.preset_runs import (
    PRESETS,
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
from tests.ppo.preset_switches import DEPARTURES, STANDARD, WARN

# the files of conf/algo
# ------------------------------------------------------------------------------------------------------------
SIZES = {"sums": {"prompts": 128}}


def of_all_sizes(preset):
    return composed(preset, **SIZES.get(preset, {"prompts": 3, "samples": 2}))


def dotted(tree, prefix=""):
    for key, value in tree.items():
        yield from dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


def test_every_preset_is_tested():
    assert sorted(DEPARTURES) == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_switches_of_each_preset(preset):
    switches = dict(dotted(of_all_sizes(preset).algo.model_dump()))
    expected = STANDARD | DEPARTURES[preset]
    assert DEPARTURES[preset].keys() <= switches.keys()  # the others may be keys of other variants
    assert switches == {key: value for key, value in expected.items() if key in switches}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_that_reproduce_an_error_report_it(preset):
    config = of_all_sizes(preset)
    lines = warnings(config, hides_stops=config.algo.train_on_eos is False)
    assert len(lines) == (preset in WARN) and all(line.startswith("warning    algo: ") for line in lines)


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
    )
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
    p, out = case.params, {name: array(x).copy() for name, x in case.outputs.items()}
    for i, n in enumerate(case.mask.sum(1).tolist()):
        if n < WIDTH:
            back = p["kl_coef"] * float(case.old_logprobs[i, n] - case.ref_logprobs[i, n])
            out["rewards"][i, n] += back
            for t in range(n + 1):
                out["advantages"][i, t] += back * p["lam"] ** (n - t)
                out["returns"][i, t] += back * p["lam"] ** (n - t)
    out |= losses(case, out["advantages"], out["returns"], out["loss_mask"].astype(bool))
    return {name: torch.as_tensor(x) for name, x in out.items()}


@pytest.mark.parametrize(("case", "key"), outputs("pipelines.json", NOT_OFFERED))
def test_pipelines(world, case, key):
    actual, golden = ACTUAL[key](run_of(world, case)), expected(case, key)
    if key == "advantages" or (case.id in RUBBISH_BEYOND and key in ("rewards", "returns")):
        # DeepSpeed-Chat also computes an advantage after the end, but does not use it
        actions = case.outputs["loss_mask"].bool()
        actual, golden = under(actions, actual), golden[actions]
    close(actual, golden)


CLIPPED = [case for case in OFFERED.values() if case.params.get("clip_reward")]


@pytest.mark.parametrize("case", CLIPPED, ids=lambda case: case.id)
def test_a_preset_clips_scores_as_its_system_does(world, case):
    """The goldens' scores are below the bound, so they are tripled, and clipped by hand."""
    bound, numbers = case.params["clip_reward"], dialogue(case)
    large = 3 * numbers.scores
    assert (large.abs() > bound).any() and (large.abs() < bound).any()
    runs = {
        how: make_and_learn(composed(*SYSTEMS[case.id], *more), world, replace(numbers, scores=scores))
        for how, scores, more in (
            ("clipped by the preset", large, ()),
            ("clipped by hand", large.clamp(-bound, bound), ("algo.reward_shaping.clip=null",)),
            ("not clipped", large, ("algo.reward_shaping.clip=null",)),
        )
    }
    rewards = {how: run.experience.rewards for how, run in runs.items()}
    assert torch.equal(rewards["clipped by the preset"], rewards["clipped by hand"])
    assert not torch.allclose(rewards["clipped by the preset"], rewards["not clipped"])


def test_verl_bounds_the_loss_of_unlikely_bad_tokens(world):
    """At a ratio of 20, above dual_clip_c, negative advantages have no gradient; no golden covers this."""
    case = OFFERED["verl"]
    numbers = dialogue(case)
    numbers = replace(numbers, now=numbers.old + math.log(20.0))
    run, unbounded = (
        make_and_learn(composed(*SYSTEMS["verl"], *more), world, numbers)
        for more in ((), ("algo.policy.dual_clip=null",))
    )
    bad = run.experience.response_mask & (run.experience.advantages < 0)
    assert bad.any() and case.params["dual_clip_c"] < 20
    assert not gradient_of(run.actor)[bad].any() and gradient_of(unbounded.actor)[bad].all()


def test_every_table_entry_is_used():
    assert_no_stale_entries("pipelines.json", ACTUAL, NOT_OFFERED)


# one state more than tokens, except in rows 0 and 5, which reach their limit
ONE_MORE = torch.arange(WIDTH + 1) < torch.tensor([[10], [2], [8], [5], [10], [10]])


@of_each_system
def test_passes_and_states(world, case):
    run = run_of(world, case)
    assert len(run.actor.steps) == len(run.critic.steps) == DEPARTURES[SYSTEMS[case.id][0]]["epochs"]
    actions = torch.nn.functional.pad(case.outputs["loss_mask"].bool(), (0, 1))
    assert torch.equal(run.experience.value_mask, ONE_MORE if case.id == "trl" else actions)
    places, lengths = torch.arange(WIDTH + 1), case.mask.sum(1, keepdim=True)
    answered = places[:-1] < lengths
    assert torch.equal(run.experience.values[:, :-1][answered], case.old_values.float()[answered])
    assert not run.experience.values[places > lengths].any()  # critic outputs of padding are not kept


# cases without a golden are compared with plain loops, which are first compared with the goldens
def array(x):
    return x.double().numpy()


def losses(
    case,
    advantages,
    returns,
    mask,
    value_mask=None,
    *,
    dual=None,
    clip_value=0.2,
    half=True,
    agg="token_mean",
):
    policy = loops.policy_loss(
        array(case.logprobs), array(case.old_logprobs), advantages, mask, dual=dual, agg=agg
    )
    value_mask = mask if value_mask is None else value_mask
    value = loops.value_loss(
        array(case.values), array(case.old_values), returns, value_mask, clip=clip_value, half=half, agg=agg
    )
    return dict(
        zip(("policy_loss", "policy_grad", "value_loss", "value_grad"), (*policy, *value), strict=True)
    )


BLOG = {"clip_value": None, "half": False, "agg": "seq_mean_token_mean"}
SHAPES = {
    "openrlhf": {"clip_value": 0.5},
    "verl": {"clip_value": 0.5, "dual": 3.0},
    "trl": {"value_mask": ONE_MORE[:, :WIDTH].numpy()},
    "seed_a_eos_dropped": BLOG,
    "seed_a_eos_kept": BLOG,
}
WHITENED = {"openrlhf": {"unbiased": False}, "verl": {"unbiased": True}}


@of_each_system
def test_the_loops_give_the_losses_of_the_goldens(case):
    golden = {name: array(x) for name, x in case.outputs.items()}
    found = losses(
        case,
        golden["advantages"],
        golden["returns"],
        golden["loss_mask"].astype(bool),
        **SHAPES.get(case.id, {}),
    )
    for name, x in found.items():
        factor = 5 / 6 if case.id == "seed_a_eos_dropped" else 1  # see `expected`
        np.testing.assert_allclose(factor * x, golden[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["openrlhf", "verl", "seed_a_eos_kept"])
def test_the_loops_give_the_advantages_of_the_goldens(name):
    case = OFFERED[name]
    p, mask, limit = case.params, array(case.mask).astype(bool), case.params.get("clip_reward", np.inf)
    rewards = loops.rewards(
        array(case.scores).clip(-limit, limit),
        array(case.old_logprobs - case.ref_logprobs),
        mask,
        p["kl_coef"],
    )
    advantages, returns = loops.gae(rewards, array(case.old_values), mask, p["gamma"], p["lam"])
    if name in WHITENED:
        advantages = loops.whitened(advantages, mask, **WHITENED[name])
    for key, x in (("rewards", rewards), ("returns", returns), ("advantages", advantages)):
        # OpenRLHF's goldens are float32
        np.testing.assert_allclose(x[mask], array(case.outputs[key])[mask], rtol=2e-5, atol=1e-6)


def all_equal(run, wanted):
    for key, x in wanted.items():
        close(ACTUAL[key](run), x)


def test_standard(world):
    """The score, clipped to 5, is on the last action, the reward includes 0.05 * KL, and GAE has gamma 1 and
    lambda 0.95. Whitening uses the biased variance, and both clips are 0.2.
    """
    case = OFFERED["openrlhf"]
    mask, kl = array(case.mask).astype(bool), array(case.old_logprobs - case.ref_logprobs)
    rewards = loops.rewards(array(case.scores).clip(-5, 5), kl, mask, 0.05)
    advantages, returns = loops.gae(rewards, array(case.old_values), mask, 1.0, 0.95)
    advantages = loops.whitened(advantages, mask, unbiased=False)
    wanted = {"rewards": rewards, "advantages": advantages, "returns": returns, "loss_mask": mask}
    run = run_of(world, case, "standard")
    all_equal(run, wanted | losses(case, advantages, returns, mask))
    assert len(run.actor.steps) == 2


@pytest.mark.parametrize(("target", "passes"), [("0.25", 2), ("0.01", 1)])
def test_minimind_token(world, target, passes):
    """Differs from standard: the loss includes 0.02 * k3 to the reference and half the value loss, and scores
    are not clipped.

    There is a second pass unless the KL to the old policy has exceeded the target.
    """
    case = OFFERED["openrlhf"]
    mask, now, old = array(case.mask).astype(bool), array(case.logprobs), array(case.old_logprobs)
    rewards = loops.rewards(array(case.scores), np.zeros(mask.shape), mask, 0.0)
    advantages, returns = loops.gae(rewards, array(case.old_values), mask, 1.0, 0.95)
    advantages = loops.whitened(advantages, mask, unbiased=False)
    wanted = losses(case, advantages, returns, mask)
    kl, kl_gradient = loops.k3_loss(now, array(case.ref_logprobs), mask)
    wanted["policy_loss"] += 0.02 * kl
    wanted["policy_grad"] += 0.02 * kl_gradient
    wanted |= {name: 0.5 * wanted[name] for name in ("value_loss", "value_grad")}
    run = run_of(world, case, "minimind_token", *([] if target == "0.25" else [f"algo.target_kl={target}"]))
    all_equal(run, wanted | {"rewards": rewards, "advantages": advantages, "returns": returns})
    assert 0.01 < loops.k3_loss(old, now, mask)[0] < 0.25
    assert len(run.actor.steps) == passes


def test_zysnlp_puts_the_score_on_the_last_remaining_action(world):
    """Moves the score of the tutorial's golden from the masked end token to the last action.

    Each earlier position gets 0.1 * 0.2 of what the next position gets. Row 0 has no end token and keeps its
    score; row 1 consists of an end token only.
    """
    case = OFFERED["seed_a_eos_dropped"]
    out = {name: array(x).copy() for name, x in case.outputs.items()}
    for i, n in enumerate([10, 0, 6, 3, 8, 9]):  # actions
        if case.has_eos[i]:
            out["rewards"][i, n] -= float(case.scores[i])  # no score is clipped
        for t in range(n if case.has_eos[i] else 0):
            more = float(case.scores[i]) * 0.02 ** (n - 1 - t)
            out["rewards"][i, t] += more if t == n - 1 else 0.0
            out["advantages"][i, t] += more
            out["returns"][i, t] += more
    assert case.scores.abs().max() < 5
    all_equal(
        run_of(world, case, "zysnlp", "algo.minibatch_size=null"),
        out | losses(case, out["advantages"], out["returns"], out["loss_mask"].astype(bool), **BLOG),
    )
