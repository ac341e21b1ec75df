"""Every switch arrives: values that are not the defaults, from the command line to the parts that use them."""

from types import SimpleNamespace

import pytest

from ppo_ds.build.algorithm import (
    eval_weights,
    experience_maker,
    hidden_stops,
    kl_controller,
    learner,
    pretraining,
)
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
        owner = getattr(owner, name)
    return owner


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("algo.kl.place=loss", "kl.in_reward", False),
        ("algo.kl.estimator=k2", "kl.estimator", "k2"),
        ("algo.train_on_eos=false", "hidden_stops", (2, 3)),
        ("algo.train_on_eos=null", "hidden_stops", (3,)),
        ("algo.gae.gamma=0.5", "estimator.gamma", 0.5),
        ("algo.gae.lam=0.5", "estimator.lam", 0.5),
        ("algo.gae.lam_critic=0.5", "estimator.lam_critic", 0.5),
        ("algo.gae.bootstrap_truncated=true", "estimator.bootstrap_truncated", True),
        ("algo.action_level=sequence", "estimator.level", "sequence"),
        ("algo.action_level=sequence", "estimator.position", "prompt_last"),
        ("algo.action_level=sequence", "whitening.level", "sequence"),
        ("algo.advantage.whiten=minibatch", "whitening.over", "minibatch"),
        ("algo.advantage.unbiased=true", "whitening.unbiased", True),
        ("algo.reward_shaping.score_position=next_token", "place.place", "next_token"),
        ("algo.value.next_state=untrained", "estimator.place.next_state", "untrained"),
        ("algo.reward_shaping.clip=7", "shaper.clip", 7.0),
        ("algo.reward_shaping.normalize=first", "shaper.normalize", "first"),
        ("algo.reward_shaping.normalize_std=false", "shaper.with_std", False),
        ("algo.reward_shaping.missing_eos=scale", "shaper.penalties.missing_eos", "scale"),
        ("algo.reward_shaping.missing_eos_value=0.3", "shaper.penalties.missing_eos_value", 0.3),
        ("algo.reward_shaping.overlong_buffer=4", "shaper.penalties.overlong_buffer", 4.0),
        ("algo.reward_shaping.overlong_factor=0.3", "shaper.penalties.overlong_factor", 0.3),
        ("algo.reward_shaping.length_penalty=0.3", "shaper.penalties.per_token", 0.3),
        ("algo.rollout_is.kind=icepop", "correction.kind", "icepop"),
        ("algo.rollout_is.low=0.3", "correction.low", 0.3),
        ("algo.rollout_is.high=3", "correction.high", 3.0),
        ("memory.score_tokens=77", "token_budget", 77),
    ],
)
def test_of_the_experience(world, override, where, value):
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
        ("algo.policy.loss=cispo", "policy.kind", "cispo"),
        ("algo.policy.clip_low=0.3", "policy.clip_low", 0.3),
        ("algo.policy.clip_high=0.3", "policy.clip_high", 0.3),
        ("algo.policy.dual_clip=3", "policy.dual_clip", 3.0),
        ("algo.loss.agg=seq_mean_token_sum", "policy.agg", "seq_mean_token_sum"),
        ("algo.loss.agg=seq_mean_token_sum", "value.agg", "seq_mean_token_sum"),
        ("algo.entropy.coef=0.3", "policy.entropy_coef", 0.3),
        ("algo.entropy.kind=sample", "policy.entropy_kind", "sample"),
        ("algo.kl.place=loss", "policy.kl_in_loss", True),
        ("algo.kl.estimator=k2", "policy.kl_estimator", "k2"),
        ("algo.aux_coef=0.3", "policy.aux_coef", 0.3),
        ("algo.aux_coef=null", "policy.aux_coef", 0.25),
        ("algo.value.clip=0.3", "value.clip", 0.3),
        ("algo.value.half=false", "value.half", False),
        ("algo.value.coef=0.3", "value.coef", 0.3),
        ("memory.train_tokens=77", "token_budget", 77),
    ],
)
def test_of_the_learner(world, override, where, value):
    plain, changed = made(world)[1], made(world, override)[1]
    assert at(changed, where) == value and at(plain, where) != value


def test_what_two_keys_make(world):
    norm = made(world, "algo.loss.agg=token_sum_norm", "algo.loss.norm=33")[1].norm
    assert norm == 33 and made(world)[1].norm == composed("standard").sampling.max_new_tokens
    average = object()
    with_average = made(world, "actor.ema.decay=0.7", ema=average)[1]
    assert with_average.ema is average and with_average.ema_decay == 0.7
    texts = iter(())
    assert made(world, "algo.ptx.coef=0.3", "data.ptx_path=org/texts", ptx_texts=texts)[1].ptx.coef == 0.3
    assert made(world)[1].ptx is None


def test_pretraining_has_the_rewards_to_come(world):
    found = pretraining(
        made(world, "algo.gae.lam_critic=0.5", "algo.gae.bootstrap_truncated=true")[0]
    ).estimator
    assert (found.lam, found.lam_critic, found.bootstrap_truncated) == (1.0, None, False)


def test_the_controllers():
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


def test_evaluation_by_the_average_where_asked_for():
    swapped = object()
    ema = SimpleNamespace(swapped=swapped)
    assert eval_weights(ema, wanted=True) is swapped and eval_weights(ema, wanted=False) is not swapped
    with eval_weights(None, wanted=True)():
        pass


def test_end_tokens_that_are_no_actions():
    assert hidden_stops(True, (2, 3), 3) == () and hidden_stops(None, (2, 3), 7) == ()


@pytest.mark.parametrize("packed", [True, False])
def test_forwards_are_planned_without_padding_where_all_models_are(world, packed):
    critic = SimpleNamespace(module=SimpleNamespace(packed=packed))
    assert [part.packed for part in made(world, critic=critic)] == [packed, packed]
