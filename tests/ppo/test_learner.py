"""Tests learn() against a plain loop over rows and tokens.

The loop uses float64, without micro-batches, ranks or batch totals.
"""

from dataclasses import replace

import pytest
import torch

from ppo_ds.algorithm.policy.keys import POLICY_LOSSES
from ppo_ds.assemble.algorithm import transforms
from tests.ppo.learner_cases import (
    ANSWERS,
    PROMPTS,
    TinyPolicy,
    V,
    by_hand,
    learned,
    old_around,
    on_policy,
    same,
)
from tests.ppo.preset_runs import composed


@pytest.fixture
def rows(experience):
    """Makes rows whose old log-probs are near a fresh policy's: ratios lie on both sides of every clip."""
    return old_around(experience(PROMPTS, ANSWERS))


OBJECTIVES = {
    "plain": {},
    "entropy": dict(policy=dict(entropy_coef=0.3)),
    "kl": dict(policy=dict(kl_in_loss=True), kl_coef=0.7),
    "asymmetric": dict(policy=dict(clip_low=0.1, clip_high=0.5, dual_clip=1.5)),
    "sequence_mean": dict(
        policy=dict(agg="seq_mean_token_mean", entropy_coef=0.3), value=dict(agg="seq_mean_token_mean")
    ),
    "sequence_sum": dict(policy=dict(agg="seq_mean_token_sum"), value=dict(agg="seq_mean_token_sum")),
    "sum_norm": dict(policy=dict(agg="token_sum_norm"), value=dict(agg="token_sum_norm")),
    "positive": dict(policy=dict(positive_nll=0.3, above=0.2)),
    "value": dict(value=dict(clip=None, half=False, coef=0.1)),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_the_weights_after_all_steps_are_those_of_the_loop_by_hand(world, rows, objective, budget):
    settings = OBJECTIVES[objective]
    seen, actor, critic = learned(world, rows, budget=budget, **settings)
    same((actor, critic), by_hand(rows, **settings))
    assert actor.steps == critic.steps == 4
    assert seen["policy/clipfrac"] > 0 and (seen["policy/clipfrac_low"] > 0) == (objective == "asymmetric")
    assert (seen["value/clipfrac"] > 0) == (objective != "value")
    before = TinyPolicy(V, 1)
    assert (actor.module.head - before.head).abs().max() > 1e-3  # the weights must have changed


@pytest.mark.parametrize("objective", ["plain", "kl", "sequence_mean", "sum_norm", "positive"])
@pytest.mark.parametrize(("ranks", "budget"), [(2, 1), (2, 24), (4, 10_000)])
def test_ranks_change_neither_weights_nor_numbers(on_ranks, world, rows, objective, ranks, budget):
    settings = OBJECTIVES[objective]
    alone, *engines = learned(world, rows, **settings)
    del alone["perf/pad_frac_update"]  # depends on how rows are grouped into forwards
    for numbers, *others in on_ranks(ranks, lambda world: learned(world, rows, budget=budget, **settings)):
        same(others, [engine.module for engine in engines])
        del numbers["perf/pad_frac_update"]
        assert numbers == pytest.approx(alone, rel=1e-6, abs=1e-7)


# settings of the policy losses that select tokens, and of PPO and CISPO with a selection of the loop
SELECTING = {
    "clip_cov": dict(cov_frac=0.3, cov_low=-1.0, cov_high=1.0),
    "kl_cov": dict(cov_frac=0.3),
    "ppo": dict(top_entropy=0.2),
    "cispo": dict(off_policy_limit=0.1),
}


def learned_with(world, rows, loss, budget=10_000):
    section = POLICY_LOSSES[loss](**SELECTING.get(loss, {}))
    noise = torch.rand(rows.response_mask.shape, generator=torch.Generator().manual_seed(1))
    algo = composed("standard", "algo.advantage.whiten=none").algo.model_copy(update={"policy": section})
    keys = {key: value for key, value in SELECTING.get(loss, {}).items() if key != "off_policy_limit"}
    policy = dict(kind=loss, keys=keys, off_policy_limit=section.off_policy_limit)
    settings = dict(policy=policy, transforms=transforms(algo), budget=budget)
    return learned(world, replace(rows, entropy=noise), **settings)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_ranks_and_micro_batches_do_not_change_which_tokens_are_trained(on_ranks, world, rows, loss):
    alone, *engines = learned_with(world, rows, loss)
    if loss in SELECTING:
        _, plain, _ = learned(world, rows, policy=dict(kind="cispo" if loss == "cispo" else "ppo"))
        assert (engines[0].module.head - plain.module.head).abs().max() > 1e-4
    del alone["perf/pad_frac_update"]
    if loss == "cispo":
        assert 0 < alone["policy/off_policy_frac"] < 1
    for ranks, budget in ((1, 1), (2, 24)):
        for numbers, *others in on_ranks(ranks, lambda world, b=budget: learned_with(world, rows, loss, b)):
            same(others, [engine.module for engine in engines])
            del numbers["perf/pad_frac_update"]
            assert numbers == pytest.approx(alone, rel=1e-6, abs=1e-7)


def test_the_ratio_is_to_the_old_policy_and_not_to_the_generating_one(world, rows):
    seen, *engines = learned(world, replace(rows, logprobs=rows.logprobs * 1e3))
    same(engines, by_hand(rows))


def test_minibatch_size_makes_the_steps(world, rows):
    for size, steps in ((8, 3), (4, 6), (2, 12)):
        _, actor, critic = learned(world, rows, minibatch_size=size, epochs=3)
        same((actor, critic), by_hand(rows, minibatch_size=size, epochs=3))
        assert actor.steps == steps and actor.backwards == [1] * steps


def test_padding_metrics(world, experience):
    """The four rows have 9, 7, 3 and 2 tokens.

    Padded, they have 36 positions, of which 15 hold no token; packed, they need no padding.
    """
    rows = experience([4, 3, 1, 1], [5, 4, 2, 1])
    assert learned(world, rows, epochs=1)[0]["perf/pad_frac_update"] == pytest.approx(15 / 36)
    # rows of 9 and 7 tokens share a forward, and rows of 3 and 2 tokens
    assert learned(world, rows, epochs=1, budget=18)[0]["perf/pad_frac_update"] == pytest.approx(3 / 24)
    seen, actor, _ = learned(world, rows, epochs=1, budget=21, packed=True)
    assert (
        seen["perf/pad_frac_update"] == 0
        and actor.backwards == [1]
        and learned(world, rows, epochs=1, budget=21)[1].backwards == [2]
    )


# -- numbers -------------------------------------------------------------------------------------------------


def test_the_first_ratio_is_one_and_one_step_reports_the_state_before_it(world, rows):
    rows, entropies = on_policy(rows)
    seen, actor, _ = learned(world, rows, minibatch_size=8, epochs=1, budget=20)
    advantages = rows.advantages[rows.response_mask]
    assert seen["parity/ratio_first_minibatch_max"] == seen["policy/ratio_max"] == pytest.approx(1, abs=1e-9)
    assert (
        seen["policy/ratio_mean"] == pytest.approx(1)
        and seen["policy/clipfrac"] == seen["policy/clipfrac_low"] == 0
    )
    assert seen["policy/approx_kl"] == pytest.approx(0, abs=1e-12) and seen["policy/kl_k1"] == pytest.approx(
        0, abs=1e-9
    )
    assert seen["policy/loss"] == pytest.approx(-float(advantages.double().mean()), rel=1e-6)
    assert seen["policy/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-6)
    assert (
        seen["policy/epochs_run"] == 1.0
        and seen["policy/early_stopped"] == 0.0
        and "policy/kl_loss" not in seen
    )
    assert actor.backwards[0] > 1


def test_gradient_norms_are_those_of_the_whole_step_averaged_over_steps(world, rows):
    reference = TinyPolicy(V, 1)
    rows, _ = on_policy(rows)
    logprobs, *_ = reference(rows.ids, rows.attention_mask, rows.response_width)
    mask = rows.response_mask
    (-(logprobs - rows.old_logprobs)[mask].exp() * rows.advantages[mask]).mean().backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    seen, *_ = learned(world, rows, minibatch_size=8, epochs=1, budget=20)
    assert seen["policy/grad_norm"] == pytest.approx(float(expected), rel=1e-6)
