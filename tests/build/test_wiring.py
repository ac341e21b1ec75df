"""Tests that every switch reaches its component: non-default values from the command line to their use."""

from types import SimpleNamespace

import pytest

from ppo_ds.build.algorithm import (
    eval_weights,
    experience_maker,
    kl_controller,
    learner,
    masked_stop_ids,
    pretraining,
)
from ppo_ds.build.ppo import build_evaluator, build_sampling
from ppo_ds.ops.losses import seq_mean_token_sum
from ppo_ds.ppo.advantages import estimate_one_step
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.training.health import Health
from ppo_ds.training.timing import PhaseTimer
from tests.ppo.preset_runs import composed

CRITIC = SimpleNamespace(module=SimpleNamespace(packed=True))
ACTOR = SimpleNamespace(module=SimpleNamespace(packed=True, balance_coef=0.25))


def made(world, *overrides, critic=CRITIC, ema=None, ptx_texts=None):
    config = composed("standard", *overrides)
    timer = PhaseTimer(world.device)
    maker = experience_maker(
        config,
        world=world,
        actor=ACTOR,
        reference=None,
        critic=critic,
        lagged=None,
        stop_token_ids=(2, 3),
        pad_id=3,
        timer=timer,
    )
    return maker, learner(
        config,
        world=world,
        actor=ACTOR,
        critic=critic,
        ptx_texts=ptx_texts,
        ema=ema,
        timer=timer,
        health=Health(1),
    )


def at(owner, path):
    for name in path.split("."):
        owner = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    return owner


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("algo.kl.place=loss", "charged_kl", None),
        ("algo.kl.estimator=k2", "charged_kl.keywords.estimator", "k2"),
        ("algo.train_on_eos=false", "masked_stop_ids", (2, 3)),
        ("algo.train_on_eos=null", "masked_stop_ids", (3,)),
        ("algo.gae.gamma=0.5", "estimate_advantages.keywords.gae.gamma", 0.5),
        ("algo.gae.lam=0.5", "estimate_advantages.keywords.gae.lam", 0.5),
        ("algo.gae.lam_critic=0.5", "estimate_advantages.keywords.gae.lam_critic", 0.5),
        ("algo.gae.bootstrap_truncated=true", "estimate_advantages.keywords.gae.bootstrap_truncated", True),
        ("algo.action_level=sequence", "estimate_advantages.func", estimate_one_step),
        ("algo.action_level=sequence", "whitening.level", "sequence"),
        ("algo.advantage.whiten=minibatch", "whitening.over", "minibatch"),
        ("algo.advantage.unbiased=true", "whitening.unbiased", True),
        ("algo.reward_shaping.score_position=next_token", "score_position.position", "next_token"),
        (
            "algo.value.next_state=untrained",
            "estimate_advantages.keywords.score_position.next_state",
            "untrained",
        ),
        ("algo.reward_shaping.clip=7", "shaper.shaping.clip", 7.0),
        ("algo.reward_shaping.normalize=first", "shaper.shaping.normalize", "first"),
        ("algo.reward_shaping.normalize_std=false", "shaper.shaping.normalize_std", False),
        ("algo.reward_shaping.missing_eos=scale", "shaper.shaping.missing_eos", "scale"),
        ("algo.reward_shaping.missing_eos_value=0.3", "shaper.shaping.missing_eos_value", 0.3),
        ("algo.reward_shaping.overlong_buffer=4", "shaper.shaping.overlong_buffer", 4.0),
        ("algo.reward_shaping.overlong_factor=0.3", "shaper.shaping.overlong_factor", 0.3),
        ("algo.reward_shaping.length_penalty=0.3", "shaper.shaping.length_penalty", 0.3),
        ("algo.rollout_is.kind=icepop", "rollout_is.kind", "icepop"),
        ("algo.rollout_is.low=0.3", "rollout_is.low", 0.3),
        ("algo.rollout_is.high=3", "rollout_is.high", 3.0),
        ("memory.score_tokens=77", "token_budget", 77),
    ],
)
def test_switches_reach_the_experience_maker(world, override, where, value):
    plain, changed = made(world)[0], made(world, override)[0]
    assert at(changed, where) == value and at(plain, where) != value


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("algo.epochs=3", "epochs", 3),
        ("algo.minibatch_size=2", "minibatch_size", 2),
        ("algo.target_kl=0.3", "target_kl", 0.3),
        ("algo.advantage.whiten=minibatch", "whitening.over", "minibatch"),
        ("algo.action_level=sequence", "policy.level", "sequence"),
        ("algo.policy.loss=cispo", "policy.loss.keywords.kind", "cispo"),
        ("algo.policy.clip_low=0.3", "policy.clip.clip_low", 0.3),
        ("algo.policy.clip_high=0.3", "policy.clip.clip_high", 0.3),
        ("algo.policy.dual_clip=3", "policy.clip.dual_clip", 3.0),
        ("algo.loss.agg=seq_mean_token_sum", "policy.agg", seq_mean_token_sum),
        ("algo.loss.agg=seq_mean_token_sum", "value.agg", seq_mean_token_sum),
        ("algo.entropy.coef=0.3", "policy.entropy.coef", 0.3),
        ("algo.entropy.kind=sample", "policy.entropy.kind", "sample"),
        ("algo.aux_coef=0.3", "policy.aux_coef", 0.3),
        ("algo.aux_coef=null", "policy.aux_coef", 0.25),
        ("algo.value.clip=0.3", "value.value.clip", 0.3),
        ("algo.value.half=false", "value.value.half", False),
        ("algo.value.coef=0.3", "value.value.coef", 0.3),
        ("memory.train_tokens=77", "token_budget", 77),
    ],
)
def test_switches_reach_the_learner(world, override, where, value):
    plain, changed = made(world)[1], made(world, override)[1]
    assert at(changed, where) == value and at(plain, where) != value


def test_values_that_depend_on_two_keys(world):
    in_loss = "algo.kl.place=loss"
    assert made(world)[1].policy.kl is None and made(world, in_loss)[0].charged_kl is None
    assert made(world, in_loss)[1].policy.kl.keywords == {"estimator": "k1"}
    assert made(world, in_loss, "algo.kl.estimator=k2")[1].policy.kl.keywords == {"estimator": "k2"}
    one_step = made(world, "algo.action_level=sequence")[0].estimate_advantages
    assert one_step.keywords["value_position"] == "prompt_last"
    at_end = made(world, "algo.action_level=sequence", "algo.value.position=response_last")[0]
    assert at_end.estimate_advantages.keywords["value_position"] == "response_last"
    norm = made(world, "algo.loss.agg=token_sum_norm", "algo.loss.norm=33")[1].norm
    assert norm == 33 and made(world)[1].norm == composed("standard").sampling.max_new_tokens
    average = object()
    with_average = made(world, "actor.ema.decay=0.7", ema=average)[1]
    assert with_average.ema is average and with_average.ema_decay == 0.7
    texts = iter(())
    assert made(world, "algo.ptx.coef=0.3", "data.ptx_path=org/texts", ptx_texts=texts)[1].ptx.coef == 0.3
    assert made(world)[1].ptx is None


def test_critic_pretraining_uses_rewards_to_go(world):
    switches = ("algo.gae.gamma=0.5", "algo.gae.lam_critic=0.5", "algo.gae.bootstrap_truncated=true")
    found = pretraining(composed("standard", *switches), made(world, *switches)[0])
    gae = found.estimate_advantages.keywords["gae"]
    assert (gae.gamma, gae.lam, gae.lam_critic, gae.bootstrap_truncated) == (0.5, 1.0, None, False)


def test_kl_controllers_are_built():
    bounds = ("algo.kl.target=3", "algo.kl.min_coef=0.01", "algo.kl.max_coef=0.9")
    adaptive = kl_controller(
        composed("standard", "algo.kl.controller=adaptive", "algo.kl.horizon=999", *bounds)
    )
    assert (adaptive.value, adaptive.target, adaptive.horizon, adaptive.min_coef, adaptive.max_coef) == (
        0.05,
        3.0,
        999.0,
        0.01,
        0.9,
    )
    threshold = kl_controller(composed("standard", "algo.kl.controller=threshold", *bounds))
    assert (threshold.value, threshold.target, threshold.min_coef, threshold.max_coef) == (
        0.05,
        3.0,
        0.01,
        0.9,
    )


def test_evaluation_uses_the_average_on_request():
    swapped = object()
    ema = SimpleNamespace(swapped=swapped)
    assert eval_weights(ema, wanted=True) is swapped and eval_weights(ema, wanted=False) is not swapped
    with eval_weights(None, wanted=True)():
        pass


def test_masked_stop_ids():
    assert masked_stop_ids(True, (2, 3), 3) == () and masked_stop_ids(None, (2, 3), 7) == ()


@pytest.mark.parametrize("packed", [True, False])
def test_forwards_are_planned_without_padding_if_all_models_are_packed(world, packed):
    critic = SimpleNamespace(module=SimpleNamespace(packed=packed))
    assert [part.packed for part in made(world, critic=critic)] == [packed, packed]


def test_the_temperature_of_sampling_is_the_policys():
    config = composed("standard", "sampling.top_p=0.9", "sampling.top_k=6", "sampling.min_new_tokens=2")
    limit = config.sampling.max_new_tokens
    assert build_sampling(config, (2,), 0.7) == SamplingParams(limit, 2, 0.7, 0.9, 6, (2,), ())


@pytest.mark.parametrize("greedy", [True, False])
def test_evaluation_is_greedy_on_request(world, greedy):
    sampling = SamplingParams(5, 0, 0.7, 1.0, 0, (2,), ())
    config = composed("standard", f"eval.greedy={str(greedy).lower()}")
    context = SimpleNamespace(world=world, stop=SimpleNamespace(raise_if_stopped=None))
    models = SimpleNamespace(actor=ACTOR, reward=None)
    inputs = SimpleNamespace(held_out=[], tokenizer=None)
    found = build_evaluator(config, context, inputs, models, None, sampling)
    assert found.sampling == (sampling.as_greedy() if greedy else sampling)
