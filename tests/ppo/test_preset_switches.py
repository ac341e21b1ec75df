"""Tests the values that each preset of conf/algo changes, from papers and other systems."""

import json

import pytest

from ppo_ds.config.warnings import warnings
from tests.ppo.preset_runs import PRESETS, composed

# preset: its differences from ``standard``, and the keys that only its variants have
CHANGES = """
cispo: kl.place=none advantage.estimator=grpo advantage.whiten=none policy.loss=cispo
    policy.clip_low=null policy.clip_high=4.0 reward_shaping.clip=null
    reward_shaping.overlong_buffer=0.2 dynamic_sampling.enabled=true epochs=1
dapo: kl.place=none advantage.estimator=grpo advantage.whiten=none policy.clip_high=0.28
    reward_shaping.clip=null reward_shaping.overlong_buffer=0.2 dynamic_sampling.enabled=true
    epochs=1
deepspeed_chat: kl.coef=0.1 advantage.whiten=none value.next_state=untrained
    reward_shaping.score_position=next_token train_on_eos=null epochs=1
dppo: kl.place=none advantage.estimator=dr_grpo advantage.whiten=none policy.loss=dppo_tv
    policy.delta=null loss.agg=token_sum_norm loss.norm=null reward_shaping.clip=null epochs=1
dr_grpo: kl.place=none advantage.estimator=dr_grpo advantage.whiten=none loss.agg=token_sum_norm
    loss.norm=null
    reward_shaping.clip=null epochs=1
gdpo: kl.place=none advantage.estimator=gdpo advantage.whiten=none reward_shaping.clip=null epochs=1
gmpo: kl.place=none advantage.estimator=grpo advantage.whiten=none policy.loss=gmpo
    policy.clip_low=0.4 policy.clip_high=0.4 loss.agg=seq_mean_token_mean reward_shaping.clip=null
    epochs=1
grpo: kl.place=loss kl.estimator=k3 kl.coef=0.04 advantage.estimator=grpo advantage.whiten=none
    loss.agg=seq_mean_token_mean reward_shaping.clip=null epochs=1
gspo: kl.place=none advantage.estimator=grpo advantage.whiten=none policy.loss=gspo
    policy.clip_low=0.0003 policy.clip_high=0.0004 loss.agg=seq_mean_token_mean
    reward_shaping.clip=null epochs=1
lite_ppo: kl.place=none advantage.estimator=lite_ppo advantage.whiten=none reward_shaping.clip=null
    epochs=1
maxrl: kl.place=none advantage.estimator=maxrl advantage.whiten=none reward_shaping.clip=null
    epochs=1
minimind: kl.place=loss kl.coef=0.02 advantage.whiten=none policy.clip_low=0.1
    value.position=response_last value.clip=null value.half=false value.coef=0.5
    reward_shaping.clip=null action_level=sequence old_policy=lagged aux_coef=null epochs=1
minimind_token: kl.place=loss kl.estimator=k3 kl.coef=0.02 value.coef=0.5 reward_shaping.clip=null
    aux_coef=null target_kl=0.25
n_plus: advantage.unbiased=true value.coef=0.1 reward_shaping.clip=null
    reward_shaping.normalize=first reward_shaping.normalize_std=false reward_shaping.missing_eos=set
    reward_shaping.missing_eos_value=-1.0 epochs=4
openrlhf: kl.coef=0.01 gae.lam=1.0 value.clip=0.5 reward_shaping.clip=10.0 epochs=1
reinforce_pp: kl.coef=0.01 advantage.estimator=reinforce advantage.unbiased=true
    reward_shaping.clip=10.0 epochs=1
reinforce_pp_baseline: kl.place=loss kl.estimator=k2 kl.coef=1e-05 advantage.estimator=dr_grpo
    reward_shaping.clip=10.0 epochs=1
remax: advantage.estimator=remax advantage.whiten=none reward_shaping.clip=null epochs=1
rlhf: reward_shaping.normalize=running reward_shaping.missing_eos=set
    reward_shaping.missing_eos_value=-1.0
rloo: advantage.estimator=rloo advantage.whiten=none loss.agg=seq_mean_token_sum
    reward_shaping.clip=null epochs=1
sapo: kl.place=none advantage.estimator=grpo advantage.whiten=none policy.loss=sapo
    policy.tau_pos=1.0 policy.tau_neg=1.05 loss.agg=seq_mean_token_mean reward_shaping.clip=null
    epochs=1
sequence_kl: kl.place=loss kl.coef=0.2 kl.controller=threshold kl.target=0.01 kl.unit=sequence
    kl.min_coef=0.0001 kl.max_coef=10.0 advantage.unbiased=true value.position=response_last
    value.clip=null value.half=false value.coef=0.1 entropy.coef=0.01 entropy.kind=sample
    reward_shaping.clip=null action_level=sequence epochs=4
standard:
sums: kl.coef=0.02 minibatch_size=128
trl: advantage.unbiased=true value.coef=0.1 reward_shaping.score_position=next_token
    reward_shaping.clip=null epochs=4
vapo: kl.place=none gae.lam_critic=1.0 gae.length_alpha=0.05 policy.clip_high=0.28
    value.pretrain_rollouts=50 positive_nll.coef=0.1 reward_shaping.clip=null epochs=1
verl: kl.coef=0.001 gae.lam=1.0 advantage.unbiased=true policy.dual_clip=3.0 value.clip=0.5
    reward_shaping.clip=null epochs=1
zysnlp: kl.coef=0.1 kl.after_update=true gae.gamma=0.1 gae.lam=0.2 advantage.whiten=none
    value.clip=null value.half=false loss.agg=seq_mean_token_mean reward_shaping.clip=null
    train_on_eos=false epochs=5 minibatch_size=2
zysnlp_strict: kl.coef=0.1 kl.after_update=true gae.gamma=0.1 gae.lam=0.2 advantage.whiten=none
    value.clip=null value.half=false value.next_state=ignored loss.agg=seq_mean_token_mean
    reward_shaping.score_position=next_token reward_shaping.clip=0.2 train_on_eos=false epochs=5
    minibatch_size=2
"""
CHANGED = {
    name: set(rest.split())
    for name, rest in (row.split(":") for row in CHANGES.replace("\n  ", " ").split("\n") if row)
}
# Presets that reproduce an error of a published loop and warn about it at start-up. vapo warns about the
# short responses of these tests.
WARN = {"zysnlp", "zysnlp_strict", "sequence_kl", "minimind", "deepspeed_chat", "vapo"}


def of_all_sizes(preset):
    return composed(preset, **({"prompts": 128} if preset == "sums" else {"prompts": 3, "samples": 2}))


def switches(preset):
    """Returns the keys of ``algo`` and their values, as "key=value"."""

    def dotted(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from dotted(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}={json.dumps(value).strip(chr(34))}"

    return set(dotted(of_all_sizes(preset).algo.model_dump()))


def test_every_preset_is_tested():
    assert sorted(CHANGED) == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_values_that_each_preset_changes(preset):
    assert switches(preset) - switches("standard") == CHANGED[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_that_reproduce_an_error_report_it(preset):
    config = of_all_sizes(preset)
    lines = warnings(config, hides_stops=config.algo.train_on_eos is False)
    assert len(lines) == (preset in WARN) and all(line.startswith("warning    algo: ") for line in lines)
