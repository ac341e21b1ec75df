"""Tests the KL coefficient: kl_controller.json through a preset, and PPOTrainer.step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ppo_ds.assemble.algorithm import kl_controller
from ppo_ds.ppo.health import KLMonitor
from ppo_ds.ppo.parity import ParityMonitor
from ppo_ds.ppo.trainer import PPOTrainer
from ppo_ds.types import Experience
from tests.ops.golden import assert_no_stale_entries, look_up, outputs
from tests.ppo.preset_runs import composed
from tests.ppo.trainer_cases import context


def one_token_answers(kl, n):
    """Makes n responses of one token whose mean KL to the reference is exactly ``kl``.

    Only the first response has a nonzero KL. The log-probs are float64, since the thresholds are strict.
    """
    nothing = torch.zeros(n, 1, dtype=torch.float64)
    logprobs = nothing.clone()
    logprobs[0] = kl * n  # exact, since n is a power of two
    mask = torch.ones(n, 1, dtype=torch.bool)
    return Experience(
        ids=torch.zeros(n, 2, dtype=torch.long),
        attention_mask=mask.expand(n, 2),
        response_mask=mask,
        finished=mask[:, 0],
        logprobs=logprobs,
        old_logprobs=logprobs,
        decode_logprobs=logprobs,
        ref_logprobs=nothing,
        rewards=nothing.expand(n, 2),
        advantages=nothing,
        weights=nothing,
        scores=nothing[:, 0],
    )


def coefficients(world, config, kls, n_steps):
    """Returns the coefficients of PPOTrainer.step after each step with these KLs."""
    met, used = iter(zip(kls, n_steps, strict=True)), []

    def learn(experience, kl_coef, seed, critic_only):
        return experience, used.append(kl_coef) or {}

    learn.parity = ParityMonitor(None, stops=False)
    stage = PPOTrainer(
        context=context(world, ()),
        config=config,
        total_steps=len(kls),
        data=[],
        tokenizer=None,
        weight_copies={},
        collect=lambda: (SimpleNamespace(metadata=()), None, {}),
        make_experience=lambda rollout, scores, kl_coef, critic_only: (one_token_answers(*next(met)), {}),
        learn=learn,
        kl=kl_controller(config),
        stateful={},
        evaluator=None,
        meter=lambda *seen: {},
        kl_monitor=KLMonitor(None, stops=False),
    )
    for index in range(len(kls)):
        stage.step(index)
    return [*used[1:], stage.kl.value]


CONTROLLERS = {
    "*.adaptive": (("standard", "algo.kl.controller=adaptive", "algo.kl.coef=0.2"), "kl"),
    "seed_b.threshold": (("sequence_kl",), "kl_seed_b"),
}


@pytest.mark.parametrize(("case", "key"), outputs("kl_controller.json"))
def test_controllers(world, case, key):
    preset, kls = look_up(CONTROLLERS, case, key)
    config, p, golden = (
        composed(*preset, "checkpoint.every=0", "tracker.samples=0"),
        case.params,
        case.outputs[key],
    )
    kl = config.algo.kl
    assert (kl.coef, kl.target) == (
        p["init"],
        p["target_seed_b"] if key == "seed_b.threshold" else p["target"],
    )
    assert key == "seed_b.threshold" or kl.horizon == p["horizon"]
    # seed_b has no bounds, so its coefficients must lie within the preset's bounds
    assert all(kl.min_coef < x < (kl.max_coef or 1.0) for x in golden)
    assert coefficients(world, config, case.inputs[kls], case.n_steps) == pytest.approx(
        [float(x) for x in golden], rel=1e-12
    )


def test_the_thresholds_have_bounds(world):
    """With a KL of 0, twelve steps without a floor would halve the coefficient to 0.2 / 2^12."""
    config = composed("sequence_kl", "checkpoint.every=0", "tracker.samples=0")
    assert coefficients(world, config, [0.0] * 12, [2] * 12)[-1] == 1e-4
    assert coefficients(world, config, [1.0] * 12, [2] * 12)[-1] == 10.0


def test_every_table_entry_is_used():
    assert_no_stale_entries("kl_controller.json", CONTROLLERS)
