"""Tests one optimizer step per rollout, where the forward of the update is the actor's only forward.

The results are the same as with two forwards.
"""

from dataclasses import fields, replace

import pytest
import torch

from ppo_ds.config.schema import uses_reference
from ppo_ds.planning.forwards import old_logprobs_source
from tests.ppo.algo_cases import AS_IT_IS, Stub, answers, kl_estimator, maker, without
from tests.ppo.learner_cases import ANSWERS, PROMPTS, Engine, TinyCritic, TinyPolicy, V, learner, on_policy
from tests.ppo.preset_runs import composed

ONE_STEP = dict(minibatch_size=8, epochs=1)


@pytest.fixture
def rows(experience):
    return on_policy(experience(PROMPTS, ANSWERS))[0]


def learned(world, rows, **changes):
    """Returns the experience, the metrics, the actor and the critic after one optimizer step."""
    actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
    completed, seen = learner(world, actor, critic, **ONE_STEP | changes)(rows, 0.7, 3)
    return completed, seen, actor, critic


OBJECTIVES = {
    "kl": dict(policy=dict(kl_in_loss=True)),
    "gspo": dict(policy=dict(kind="gspo", clip_low=3e-4, clip_high=4e-4)),
    "whitened": dict(whitening=replace(AS_IT_IS, over="minibatch")),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (1, 20), (2, 1)])
def test_weights_and_numbers_are_those_of_two_passes(on_ranks, rows, objective, ranks, budget):
    settings = OBJECTIVES[objective] | dict(budget=budget)
    once = on_ranks(
        ranks, lambda world: learned(world, without(rows, "logprobs", "old_logprobs"), **settings)
    )
    twice = on_ranks(ranks, lambda world: learned(world, rows, **settings))
    start = TinyPolicy(V, 1)
    for (completed, seen, *engines), (unchanged, expected, *others) in zip(once, twice, strict=True):
        assert unchanged is rows and seen == pytest.approx(expected, rel=1e-6, abs=1e-7)
        for engine, other in zip(engines, others, strict=True):
            for ours, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
        assert (engines[0].module.head - start.head).abs().max() > 1e-3
        for name in (column.name for column in fields(completed)):
            assert (getattr(completed, name) is None) == (getattr(rows, name) is None), name
        for name in ("logprobs", "old_logprobs"):
            expected_column = rows.logprobs.masked_fill(~rows.response_mask, 0.0).float()
            torch.testing.assert_close(getattr(completed, name), expected_column, rtol=0, atol=1e-6)
        assert torch.equal(completed.values, rows.values) and torch.equal(completed.ids, rows.ids)


def test_no_actor_forward_if_only_the_critic_trains(world, rows):
    bare = without(rows, "logprobs", "old_logprobs")
    actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
    completed, _ = learner(world, actor, critic, **ONE_STEP)(bare, 0.0, 3, critic_only=True)
    assert completed is bare and critic.steps == 1 and not actor.read


# -- making the experience -----------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("with_reference", [True, False])
def test_unneeded_models_make_no_forward(world, early, with_reference):
    actor, reference = Stub(), Stub(shift=2.0)
    make = maker(
        world,
        actor=actor,
        reference=reference,
        charged_kl=None,
        old_logprobs="forward" if early else "update",
    )
    if not with_reference:
        make.forwards.reference = None
    rollout = answers([2, 1], [1.0, 2.0], tokens=[[1, 2], [3]])
    made, seen = make(rollout, 0.5)
    assert (made.logprobs is not None, made.old_logprobs is not None) == (early, early)
    assert (made.ref_logprobs is not None) == with_reference
    assert (actor.forwards > 0, reference.forwards > 0) == (early, with_reference)
    full, expected = maker(world, charged_kl=None)(rollout, 0.5)
    assert (
        torch.equal(made.advantages, full.advantages)
        and torch.equal(made.rewards, full.rewards)
        and seen == expected
    )


@pytest.mark.parametrize(("in_reward", "asked"), [(True, 1), (False, 0)])
def test_critic_pretraining_runs_only_models_that_affect_returns(world, in_reward, asked):
    actor, reference = Stub(), Stub(shift=2.0)
    charged = kl_estimator("k1") if in_reward else None
    make = maker(world, actor=actor, reference=reference, charged_kl=charged)
    made, _ = make.for_pretraining()(answers([2, 1], [1.0, 2.0], tokens=[[1, 2], [3]]), 0.5)
    assert (actor.forwards, reference.forwards) == (asked, asked) and made.returns is not None


@pytest.mark.parametrize(
    ("arguments", "once"),
    [
        (("grpo",), True),  # the KL is in the loss, and there is one pass
        (("dapo",), True),
        (("grpo", "algo.minibatch_size=2"), False),
        (("grpo", "algo.epochs=2"), False),
        (("grpo", "algo.rollout_is.kind=tis"), False),
        (("grpo", "algo.old_policy=lagged"), False),
        (("rloo",), False),  # the KL is in the reward
        (("standard", "algo.epochs=1"), False),
        (("standard", "algo.epochs=1", "algo.kl.place=loss"), True),
        (("standard", "algo.epochs=1", "algo.kl.place=loss", "critic.share_trunk=true"), False),
        (("standard", "algo.epochs=1", "algo.kl.place=loss", "algo.value.warmup_steps=1"), False),
        (("minimind",), False),  # the old policy lags
    ],
)
def test_conditions_for_a_single_actor_forward(arguments, once):
    assert old_logprobs_source(composed(*arguments, samples=2)) == ("update" if once else "forward")


@pytest.mark.parametrize("preset", ["grpo", "standard"])
def test_no_actor_forward_before_the_update_with_decoded_log_probs(preset):
    assert old_logprobs_source(composed(preset, "algo.old_logprobs=rollout", samples=2)) == "rollout"


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (("grpo",), True),
        (("rloo",), True),
        (("dapo",), False),
        (("dr_grpo",), False),
        (("gspo",), False),
        (("dapo", "algo.kl.after_update=true"), True),
    ],
)
def test_no_reference_is_loaded_unless_the_kl_is_needed(arguments, loaded):
    assert uses_reference(composed(*arguments, samples=2)) == loaded
