from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppo_ds.config.registry import STAGES
from ppo_ds.config.schema import reference_is_base
from tests.config.commands import MINIMAL, complaints, compose, model_folder, problems

pytestmark = pytest.mark.usefixtures("all_extras")


def found(*arguments: str, ranks: int = 1) -> str:
    """Returns the only error line that the minimal config gives with these arguments added."""
    lines = complaints(*MINIMAL, *arguments, ranks=ranks)
    assert len(lines) == 1, lines
    return lines[0]


def test_the_minimal_config_is_sound() -> None:
    assert compose(*MINIMAL, ranks=4).algo.minibatch_size == 16


def test_an_unknown_stage_is_named_with_those_that_exist() -> None:
    assert found("stage=pppo") == f"stage=pppo: must be one of {', '.join(STAGES)}; did you mean ppo?"


@pytest.mark.parametrize("clip_low", ["1", "null"])
def test_clip_cov_may_have_no_lower_bound_as_in_the_authors_runs(clip_low: str) -> None:
    keys = ["algo.policy.loss=clip_cov", f"algo.policy.clip_low={clip_low}", "algo.policy.clip_high=1"]
    assert compose(*MINIMAL, *keys, "algo.policy.cov_frac=0.0002").algo.policy.clip_high == 1


def test_limits_of_the_log_ratio_may_be_above_1() -> None:
    assert compose(*MINIMAL, "algo.policy.loss=gmpo", "algo.policy.clip_low=1.5").algo.policy.clip_low == 1.5


@pytest.mark.parametrize(
    ("refused", "arguments"),
    [
        ("overlong_buffer=4", []),
        ("length_penalty=0.01", []),
        ("missing_eos=subtract", []),
        ("missing_eos=set", ["algo.reward_shaping.missing_eos_value=-1"]),
        ("missing_eos=scale", ["algo.reward_shaping.missing_eos_value=-0.5"]),
    ],
)
def test_maxrl_refuses_penalties_that_can_make_a_mean_score_negative(
    refused: str, arguments: list[str]
) -> None:
    maxrl = ["algo=maxrl", "rollout.samples_per_prompt=2"]
    line = found(*maxrl, f"algo.reward_shaping.{refused}", *arguments)
    assert line.startswith(
        f"algo.reward_shaping.{refused}: cannot be combined with algo.advantage.estimator=maxrl"
    )
    kept = ["algo.reward_shaping.missing_eos=set", "algo.reward_shaping.missing_eos_value=0"]
    assert compose(*MINIMAL, *maxrl, *kept).algo.reward_shaping.missing_eos == "set"


def test_remax_with_dynamic_sampling_has_one_line() -> None:
    line = found("algo=remax", "algo.dynamic_sampling.enabled=true")
    assert "compares a response with the greedy one" in line


def test_steps_or_epochs_but_not_both() -> None:
    assert "run.steps is missing" in found("run.steps=null")
    assert "run.steps=2: needs run.epochs=null" in found("run.epochs=1")
    assert compose(*MINIMAL, "run.steps=null", "run.epochs=0.5").run.epochs == 0.5


@pytest.mark.parametrize(
    ("prompts", "ranks", "fits"), [(18, 4, "16 or 20"), (3, 4, "4"), (17, 8, "16 or 24")]
)
def test_prompts_that_the_ranks_cannot_share_name_the_nearest_that_fit(
    prompts: int, ranks: int, fits: str
) -> None:
    line = found(f"rollout.prompts_per_step={prompts}", ranks=ranks)
    assert line == (
        f"rollout.prompts_per_step={prompts}: must be divisible by the number of ranks, {ranks}; "
        f"nearest that fit: {fits}"
    )


def test_ranks_that_divide_rows_fit_the_ranks_and_the_layout() -> None:
    line = found("memory.sequence_parallel=3", ranks=4)
    assert line == "memory.sequence_parallel=3: must divide the number of ranks, 4"
    line = found("memory={sequence_parallel:2,layout:padded}", ranks=4)
    assert line == "memory.layout=padded: memory.sequence_parallel divides packed rows; use packed or auto"
    line = found("memory={sequence_parallel:2,reuse_forwards:all}", ranks=4)
    assert line.startswith("memory.reuse_forwards=all: no forward is kept with memory.sequence_parallel")
    compose(*MINIMAL, "memory={sequence_parallel:2,layout:packed}", ranks=4)
    compose(*MINIMAL, "memory.sequence_parallel=8", "run.dry_run=true")  # on one rank


@pytest.mark.parametrize(
    ("minibatch", "samples", "ranks", "fits"),
    [
        (6, 1, 2, "4 or 8"),
        (3, 1, 1, "2 or 4"),
        (5, 3, 1, "4 or 6"),
        (2, 1, 4, "4"),
        (12, 3, 8, "8 or 16"),
        (40, 1, 1, "16"),
        (10, 1, 2, "8 or 16"),
    ],
)
def test_minibatches_that_do_not_fit_name_the_nearest_that_do(
    minibatch: int, samples: int, ranks: int, fits: str
) -> None:
    line = found(f"algo.minibatch_size={minibatch}", f"rollout.samples_per_prompt={samples}", ranks=ranks)
    assert line.startswith(
        f"algo.minibatch_size={minibatch}: must divide the rollout of {16 * samples} samples"
    )
    assert line.endswith(f"nearest that fit: {fits}")


def test_printed_answers_need_samples() -> None:
    line = "tracker.print_answers=3: needs tracker.samples (it is 0); otherwise set tracker.print_answers=0"
    assert found("tracker.samples=0", "tracker.print_answers=3") == line


QUANTIZED = "quantization=nf4"


def test_a_reference_with_settings_of_its_own_is_not_the_base_of_the_actors_adapters() -> None:
    assert not reference_is_base(compose(*MINIMAL))
    assert reference_is_base(compose(*MINIMAL, "actor.lora.rank=4"))
    for own in ("path=org/other", "revision=v2", "dtype=fp32", "attn_implementation=eager", QUANTIZED):
        assert not reference_is_base(compose(*MINIMAL, "actor.lora.rank=4", f"reference.model.{own}")), own


@pytest.mark.parametrize(
    ("arguments", "user"),
    [
        (("actor.optim.name=adamw_8bit",), "actor.optim.name=adamw_8bit"),
        ((f"reference.model.{QUANTIZED}",), "reference.model.quantization=nf4"),
    ],
)
def test_bitsandbytes_is_needed_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], user: str
) -> None:
    monkeypatch.setattr("ppo_ds.config.checks.models.find_spec", lambda name: None)
    compose(*MINIMAL)
    line = f"{user}: the package bitsandbytes is not installed; run: pip install -c constraints.txt -e "
    assert found(*arguments).startswith(line)


def test_the_reference_inherits_the_quantization_and_the_critic_does_not() -> None:
    config = compose(*MINIMAL, "actor.lora.rank=4", f"actor.model.{QUANTIZED}")
    assert config.reference.model.quantization == "nf4" and config.critic.model.quantization == "none"
    assert reference_is_base(config)


ADAPTIVE, SHARED, PAIRS = (
    "algo.kl.controller=adaptive",
    "critic.share_trunk=true",
    "rollout.samples_per_prompt=2",
)
SEQUENCE, GRPO, PTX = "algo.action_level=sequence", "algo.advantage.estimator=grpo", "data.ptx_path=org/texts"


# arguments -> the beginning of the only error line
CONFLICTS = r"""
actor.zero={stage:0,offload_optimizer:true} ->
    actor.zero.offload_optimizer=true: needs actor.zero.stage above 0 (it is 0); otherwise set
    actor.zero.offload_optimizer=false
critic.zero.offload_params=true ->
    critic.zero.offload_params=true: needs critic.zero.stage=3 (it is 2); otherwise set
    critic.zero.offload_params=false
actor.zero.generation_gather=layers ->
    actor.zero.generation_gather=layers: needs actor.zero.stage=3 (it is 2); otherwise set
    actor.zero.generation_gather=auto
actor.zero.generation_gather=whole ->
    actor.zero.generation_gather=whole: needs actor.zero.stage=3 (it is 2); otherwise set
    actor.zero.generation_gather=auto
reference.zero.stage=2 -> reference.zero.stage=2: must be one of 0, 3
critic.lora.lr=1e-4 ->
    critic.lora.lr=0.0001: needs critic.lora.rank above 0 (it is 0); otherwise set critic.lora.lr=auto
actor.lora.targets=[q_proj] ->
    actor.lora.targets=[q_proj]: needs actor.lora.rank above 0 (it is 0); otherwise set
    actor.lora.targets=null
actor.lora.rank=-1 -> actor.lora.rank=-1: must be at least 0
critic.optim.name=adamw_8bit critic.zero.offload_optimizer=true ->
    critic.optim.name=adamw_8bit: needs critic.zero.offload_optimizer=false (it is true); otherwise set
    critic.optim.name=adamw
actor.model.quantization=nf4 reference.model.quantization=none ->
    actor.lora.rank=0: weights of 4 bits are not trained; use LoRA, or actor.model.quantization=none
critic.model.quantization=nf4 ->
    critic.lora.rank=0: weights of 4 bits are not trained; use LoRA, or critic.model.quantization=none
actor.lora.rank=4 actor.zero.stage=3 actor.model.quantization=nf4 ->
    actor.zero.stage=3: weights of 4 bits are not sharded; use a lower one, or actor.model.quantization=none
reference.model.quantization=nf4 reference.zero.offload_params=true ->
    reference.zero.offload_params=true: is not supported for weights of 4 bits; use false, or
    reference.model.quantization=none
reward=model ~reward.path +reward.model={path:org/r,quantization:nf4} +reward.zero.stage=3 ->
    reward.zero.stage=3: weights of 4 bits are not sharded; use a lower one, or
    reward.model.quantization=none
reward=model ~reward.path +reward.model={path:org/r,quantization:nf4,trust_remote_code:true} ->
    reward.model.trust_remote_code=true: layers of a model's own code are not quantized; use a model without,
    or reward.model.quantization=none
critic.init=path -> critic.model.path is missing: critic.init=path loads the critic from it
critic.model.path=org/critic ->
    critic.model.path=org/critic: needs critic.init=path (it is auto); otherwise set critic.model.path=null
critic.init=reward -> critic.init=reward: needs a reward model, but reward._target_=
+actor.deepspeed.optimizer={type:Adam} ->
    actor.deepspeed.optimizer={type:Adam}: is set by the trainer; use actor.optim
+critic.deepspeed.train_batch_size=7 ->
    critic.deepspeed.train_batch_size=7: is set by the trainer; use the stage's batch sizes (stage=ppo:
    rollout.prompts_per_step
+actor.deepspeed.zero_optimization.stage=3 -> actor.deepspeed.zero_optimization.stage=3: use actor.zero.stage
eval.every=5 -> eval.every=5: needs data.eval_path (it is null); otherwise set eval.every=null
checkpoint.keep_best=true ->
    checkpoint.keep_best=true: the best checkpoint is chosen by evaluation; set eval.every and data.eval_path
sampling.min_new_tokens=9 -> sampling.min_new_tokens=9: must be at most sampling.max_new_tokens=8
sampling={min_new_tokens:2,stop:[x]} ->
    sampling.min_new_tokens=2: needs sampling.stop=[]; otherwise set sampling.min_new_tokens=0
sampling.temperature=0 -> sampling.temperature=0: must be above 0
checkpoint.keep_exports=3 ->
    checkpoint.keep_exports=3: needs checkpoint.export_every (it is null); otherwise set
    checkpoint.keep_exports=null
checkpoint.export_every=0 -> checkpoint.export_every=0: must be at least 1
run.profile=0 -> run.profile=0: must be at least 1
run.profile=3 -> run.profile=3: the run ends with step 2; choose an earlier one
run={profile:2,stop_at_step:1} -> run.profile=2: the run ends with step 1; choose an earlier one
checkpoint.minutes=0 -> checkpoint.minutes=0: must be above 0
checkpoint.minutes=-1 -> checkpoint.minutes=-1: must be above 0
checkpoint.minutes=.inf -> checkpoint.minutes=.inf: must be a number
checkpoint.minutes=often -> checkpoint.minutes=often: must be a number
sampling.top_p=0 -> sampling.top_p=0: must be above 0
sampling.stop=[''] -> sampling.stop=['']: must not contain an empty string
algo.gae.lam=1.5 -> algo.gae.lam=1.5: must be at least 0 and at most 1
algo.policy.dual_clip=0.5 -> algo.policy.dual_clip=0.5: must be above 1
algo.kl.controller=threshold ->
    algo.kl.controller=threshold: needs algo.kl.min_coef above 0 and algo.kl.max_coef
algo.kl.estimator=k1+ -> algo.kl.estimator=k1+: differs from k1 only in its gradient
algo.epochs=true -> algo.epochs=true: must be a whole number
tracker.samples=-2 -> tracker.samples=-2: must be at least -1
~reward._target_ -> reward._target_ is missing: choose a kind of reward first
algo.kl.controller=adaptive algo.kl.coef=0 ->
    algo.kl.coef=0: must be above 0, since algo.kl.controller=adaptive multiplies it
algo.kl.controller=adaptive algo.kl.max_coef=0.01 ->
    algo.kl.coef=0.05: must lie between algo.kl.min_coef=0 and algo.kl.max_coef=0.01
algo.kl.controller=threshold algo.kl.min_coef=0.1 algo.kl.max_coef=1 ->
    algo.kl.coef=0.05: must lie between algo.kl.min_coef=0.1
algo=maxrl rollout.samples_per_prompt=4 algo.reward_shaping.normalize=running ->
    algo.reward_shaping.normalize=running: cannot be combined with algo.advantage.estimator=maxrl
algo=gdpo rollout.samples_per_prompt=4 ->
    algo.advantage.estimator=gdpo: normalizes the parts of a reward one by one; set reward=weighted with two
    or more parts whose weight is not 0 (it has 0)
algo=maxrl rollout.samples_per_prompt=4 algo.kl.place=reward ->
    algo.kl.place=reward: cannot be combined with algo.advantage.estimator=maxrl
algo=remax rollout.samples_per_prompt=2 algo.dynamic_sampling.enabled=true ->
    algo.dynamic_sampling.enabled=true: cannot be combined with algo.advantage.estimator=remax
algo.positive_nll.above=0.5 ->
    algo.positive_nll.above=0.5: needs algo.positive_nll.coef above 0 (it is 0); otherwise set
    algo.positive_nll.above=0
algo.gae.length_alpha=0.05 algo=rloo rollout.samples_per_prompt=4 ->
    algo.gae.length_alpha=0.05: needs algo.advantage.estimator=gae (it is rloo); otherwise set
    algo.gae.length_alpha=null
algo.loss.mask_truncated=true algo.gae.bootstrap_truncated=true ->
    algo.gae.bootstrap_truncated=true: needs algo.loss.mask_truncated=false (it is true); otherwise set
    algo.gae.bootstrap_truncated=false
algo.kl.clamp=10 algo.kl.place=none ->
    algo.kl.clamp=10: limits a penalty that algo.kl.place=none does not compute
health.max_kl=2 algo.kl.place=none -> health.max_kl=2: without a reference no KL is measured
algo.kl.controller=adaptive algo.kl.place=none ->
    algo.kl.controller=adaptive: changes a coefficient that algo.kl.place=none does not use
algo.kl.estimator=k3+ ->
    algo.kl.estimator=k3+: differs from k3 only in its gradient, so it needs algo.kl.place=loss; in the reward
    use k3
algo.policy.loss=dppo ->
    algo.policy.loss=dppo: must be one of ppo, gspo, cispo, reinforce, sapo, dppo_tv, dppo_kl, gmpo, clip_cov,
    kl_cov; did you mean dppo_tv or dppo_kl?
algo.policy.dual_clip=1 -> algo.policy.dual_clip=1: must be above 1
algo.policy.clip_low=0 -> algo.policy.clip_low=0: must be above 0
algo.policy.clip_low=2 -> algo.policy.clip_low=2: must be above 0 and below 1, so set it, often to 0.2
algo.policy.clip_low=2 algo.policy.loss=cispo ->
    algo.policy.clip_low=2: must be above 0 and at most 1, since the ratio is positive
algo.policy.clip_low=null algo.policy.clip_high=1 algo.policy.loss=gmpo ->
    algo.policy.clip_low=null: must be a number, a limit of the log-ratio with algo.policy.loss=
algo.policy.clip_low=1 ->
    algo.policy.clip_low=1: must be above 0 and below 1, so set it, often to 0.2; only cispo and clip_cov can
    do without a lower bound
algo.policy.clip_low=null algo.policy.clip_high=4 algo.policy.loss=gspo ->
    algo.policy.clip_low=null: must be above 0 and below 1, so set it, often to 0.2; only cispo and clip_cov
    can do without a lower bound
algo=cispo algo.policy.loss=ppo rollout.samples_per_prompt=2 ->
    algo.policy.clip_low=null: must be above 0 and below 1, so set it, often to 0.2
algo.policy.clip_low=null algo.policy.loss=cispo ->
    algo.policy.clip_high=null: must be a number if algo.policy.clip_low is null
algo.policy.dual_clip=3 algo.policy.loss=cispo ->
    algo.policy.dual_clip=3: only used with algo.policy.loss=ppo or gspo (it is cispo); set it to null
algo.policy.tau_neg=2 ->
    algo.policy.tau_neg=2: only used with algo.policy.loss=sapo (it is ppo); set it to 1.05
algo.policy.loss=sapo algo.policy.tau_pos=0 -> algo.policy.tau_pos=0: must be above 0
algo.policy.loss=sapo algo.policy.clip_low=0.1 ->
    algo.policy.clip_low=0.1: only used with algo.policy.loss=ppo or gspo or cispo or gmpo or clip_cov (it is
    sapo)
algo.policy.clip_high=0.3 algo.policy.loss=reinforce ->
    algo.policy.clip_high=0.3: only used with algo.policy.loss=ppo or gspo or cispo or gmpo or clip_cov (it is
    reinforce); set it to null
algo.policy.loss=gspo algo.action_level=sequence ->
    algo.policy.loss=gspo: determines the ratio itself, so algo.action_level must be token
algo.policy.loss=dppo_tv algo.action_level=sequence ->
    algo.policy.loss=dppo_tv: determines the ratio itself, so algo.action_level must be token
algo.policy.loss=kl_cov algo.action_level=sequence ->
    algo.policy.loss=kl_cov: determines the ratio itself, so algo.action_level must be token
algo.policy.cov_high=7 ->
    algo.policy.cov_high=7: only used with algo.policy.loss=clip_cov (it is ppo); set it to 5
algo.policy.loss=clip_cov algo.policy.cov_low=6 -> algo.policy.cov_low=6: must be below algo.policy.cov_high=5
algo.policy.top_entropy=0.2 algo.action_level=sequence ->
    algo.policy.top_entropy=0.2: selects tokens, so algo.action_level must be token
algo.policy.top_entropy=0.2 algo.policy.loss=gspo ->
    algo.policy.top_entropy=0.2: selects tokens, but algo.policy.loss=gspo has one ratio per response
algo.rollout_is.kind=icepop algo.policy.loss=gmpo ->
    algo.rollout_is.kind=icepop: weights tokens, but algo.policy.loss=gmpo has one ratio per response
algo.policy.top_entropy=0.2 algo.old_logprobs=rollout ->
    algo.old_logprobs=rollout: needs algo.policy.top_entropy=null (it is 0.2); otherwise set
    algo.old_logprobs=auto
algo.policy.off_policy_limit=0 -> algo.policy.off_policy_limit=0: must be above 0
algo.policy.delta=0.1 ->
    algo.policy.delta=0.1: only used with algo.policy.loss=dppo_tv or dppo_kl (it is ppo); set it to null
algo.loss.norm=100 -> algo.loss.norm=100: only used with algo.loss.agg=token_sum_norm (it is token_mean)
algo.kl.controller=adaptive algo.kl.min_coef=0.1 ->
    algo.kl.coef=0.05: must lie between algo.kl.min_coef=0.1 and algo.kl.max_coef=null
algo.rollout_is.kind=tis algo.action_level=sequence ->
    algo.rollout_is.kind=tis: weights tokens, so algo.action_level must be token
algo.kl.controller=adaptive algo.kl.horizon=0.1 -> algo.kl.horizon=0.1: one step of
actor.ema.decay=1 -> actor.ema.decay=1: must be at least 0 and below 1
algo.ptx.batch_size=2 ->
    algo.ptx.batch_size=2: needs algo.ptx.coef above 0 (it is 0); otherwise set algo.ptx.batch_size=null
algo.advantage.estimator=reinforce critic.lora.rank=2 ->
    critic.lora.rank=2: needs algo.advantage.estimator=gae (it is reinforce); otherwise set critic.lora.rank=0
algo.advantage.estimator=reinforce algo.gae.lam_critic=0.5 ->
    algo.gae.lam_critic=0.5: needs algo.advantage.estimator=gae (it is reinforce); otherwise set
    algo.gae.lam_critic=null
algo.action_level=sequence algo.gae.bootstrap_truncated=true ->
    algo.gae.bootstrap_truncated=true: needs algo.action_level=token (it is sequence); otherwise set
    algo.gae.bootstrap_truncated=false
algo.rollout_is.kind=truncate algo.action_level=sequence ->
    algo.rollout_is.kind=truncate: weights tokens, so algo.action_level must be token, or
    algo.rollout_is.level sequence or sequence_mean
algo.rollout_is.kind=seq_mask_tis algo.action_level=sequence ->
    algo.rollout_is.kind=seq_mask_tis: weights tokens, so algo.action_level must be token
algo.rollout_is.kind=tis algo.rollout_is.level=sequence ->
    algo.rollout_is.level=sequence: only used with algo.rollout_is.kind=truncate or mask (it is tis)
algo.rollout_is.level=sequence_mean ->
    algo.rollout_is.level=sequence_mean: only used with algo.rollout_is.kind=truncate or mask (it is none)
algo.old_logprobs=rollout algo.old_policy=lagged ->
    algo.old_logprobs=rollout: needs algo.old_policy=rollout (it is lagged); otherwise set
    algo.old_logprobs=auto
algo.old_logprobs=rollout algo.rollout_is.kind=tis ->
    algo.old_logprobs=rollout: needs algo.rollout_is.kind=none (it is tis); otherwise set
    algo.old_logprobs=auto
algo.old_logprobs=rollout critic.share_trunk=true ->
    algo.old_logprobs=rollout: needs critic.share_trunk=false (it is true); otherwise set
    algo.old_logprobs=auto
algo.old_logprobs=rollout health.max_parity=null ->
    algo.old_logprobs=rollout: needs health.max_parity (it is null); otherwise set algo.old_logprobs=auto
algo.old_logprobs=rollout health.parity_action=warn ->
    algo.old_logprobs=rollout: needs health.parity_action=stop (it is warn); otherwise set
    algo.old_logprobs=auto
rollout.partial=true ->
    rollout.partial=true: only used with rollout.backend=static or vllm (it is auto); set it to false
rollout.backend=static rollout.partial=true ->
    rollout.partial=true: responses have tokens of earlier versions of the policy, which need importance
    weights; set algo.rollout_is.kind, for example truncate (it is none)
rollout.backend=static rollout.max_versions=3 ->
    rollout.max_versions=3: needs rollout.partial=true (it is false); otherwise set rollout.max_versions=8
rollout.backend=static rollout.partial=true algo.rollout_is.kind=tis algo.advantage.estimator=remax ->
    algo.advantage.estimator=remax: greedy responses are not continued; change it, or set
    rollout.partial=false
rollout.backend=static rollout.partial=true algo.rollout_is.kind=tis data.difficulty.floor=0.2 ->
    data.difficulty.floor=0.2: it learns the scores of a draw before the next draw; change it, or set
    rollout.partial=false
rollout.backend=static rollout.partial=true algo.rollout_is.kind=tis rollout.environment.path=a.py:Game ->
    rollout.environment.path=a.py:Game: responses of several turns are not continued later; change it, or set
    rollout.partial=false
algo.rollout_is.kind=tis algo.rollout_is.low=3 ->
    algo.rollout_is.low=3: must be at most algo.rollout_is.high=2
algo.reward_shaping.overlong_buffer=9 ->
    algo.reward_shaping.overlong_buffer=9: must be at most sampling.max_new_tokens=8
actor.ema.evaluate=true ->
    actor.ema.evaluate=true: needs actor.ema.decay (it is null); otherwise set actor.ema.evaluate=false
algo.value.position=prompt_last ->
    algo.value.position=prompt_last: with algo.action_level=token it must be token
algo.action_level=sequence algo.value.position=token ->
    algo.value.position=token: with algo.action_level=sequence it must be prompt_last or response_last
algo.action_level=sequence algo.advantage.estimator=reinforce ->
    algo.advantage.estimator=reinforce: gives each token its own return, so algo.action_level must be token
algo.advantage.estimator=grpo rollout.samples_per_prompt=2 algo.value.warmup_steps=1 ->
    algo.value.warmup_steps=1: needs algo.advantage.estimator=gae (it is grpo); otherwise set
    algo.value.warmup_steps=0
algo.advantage.estimator=grpo rollout.samples_per_prompt=2 algo.value.pretrain_rollouts=3 ->
    algo.value.pretrain_rollouts=3: needs algo.advantage.estimator=gae (it is grpo); otherwise set
    algo.value.pretrain_rollouts=0
critic.share_trunk=true algo.value.warmup_steps=1 ->
    algo.value.warmup_steps=1: needs critic.share_trunk=false (it is true); otherwise set
    algo.value.warmup_steps=0
critic.share_trunk=true algo.value.pretrain_rollouts=3 ->
    algo.value.pretrain_rollouts=3: needs critic.share_trunk=false (it is true); otherwise set
    algo.value.pretrain_rollouts=0
algo.value.warmup_steps=2 ->
    algo.value.warmup_steps=2: leaves no step that trains the actor; must be below run.steps=2
critic.share_trunk=true algo.advantage.estimator=grpo rollout.samples_per_prompt=2 ->
    critic.share_trunk=true: needs algo.advantage.estimator=gae (it is grpo); otherwise set
    critic.share_trunk=false
critic.share_trunk=true actor.lora.rank=4 ->
    critic.share_trunk=true: needs actor.lora.rank=0 (it is 4); otherwise set critic.share_trunk=false
algo.advantage.estimator=grpo ->
    algo.advantage.estimator=grpo: compares the responses to one prompt; set rollout.samples_per_prompt (it is
    1) to 2 or more
algo.advantage.whiten=group -> algo.advantage.whiten=group: compares the responses to one prompt
algo.dynamic_sampling.enabled=true -> algo.dynamic_sampling.enabled=true: compares the responses to one prompt
data.mix=[{path:org/a},{path:org/b}] -> data.path=org/prompts: needs data.mix=[]; otherwise set data.path=null
data.path=null data.mix=[{path:org/a},{path:org/b}] data.difficulty.floor=0.2 ->
    data.difficulty.floor=0.2: needs data.mix=[]; otherwise set data.difficulty.floor=null
data.shuffle=false data.difficulty.floor=0.2 ->
    data.difficulty.floor=0.2: needs data.shuffle=true (it is false); otherwise set data.difficulty.floor=null
data.difficulty.responses=4 ->
    data.difficulty.responses=4: needs data.difficulty.floor (it is null); otherwise set
    data.difficulty.responses=8
data.path=null -> data.path is missing: a Hub data set or a JSONL
algo.ptx.coef=27.8 -> algo.ptx.coef=27.8: needs data.ptx_path (it is null); otherwise set algo.ptx.coef=0
data.ptx_path=org/texts ->
    data.ptx_path=org/texts: needs algo.ptx.coef above 0 (it is 0); otherwise set data.ptx_path=null
"""


@pytest.mark.parametrize("row", re.sub(r"\n {4}", " ", CONFLICTS).strip().split("\n"))
def test_what_does_not_fit_together(row: str) -> None:
    arguments, _, line = re.sub(" +", " ", row).partition(" -> ")
    assert found(*arguments.split()).startswith(line)


@pytest.mark.parametrize(
    "arguments",
    [
        [ADAPTIVE, "algo.kl.max_coef=0.05"],
        ["algo.kl.place=loss", "algo.kl.estimator=k3+"],
        ["algo.reward_shaping.overlong_buffer=8"],
        ["algo.reward_shaping.overlong_buffer=0.5"],
        ["actor.ema={evaluate:true,decay:0.99}"],
        [SEQUENCE, "algo.value.position=response_last"],
        [SEQUENCE, GRPO, PAIRS],
        ["algo.value.warmup_steps=1", "algo.value.pretrain_rollouts=3"],
        [
            "algo.value.warmup_steps=5",
            "run.steps=null",
            "run.epochs=2",
        ],  # the number of steps is not known before the data is read
        ["algo.advantage.estimator=reinforce"],
        [GRPO, PAIRS, "algo.dynamic_sampling.enabled=true", "algo.advantage.whiten=group"],
        ["data.path=null", "data.mix=[{path:org/a},{path:org/b}]"],
        [PTX, "algo.ptx.coef=27.8"],
    ],
    ids=" ".join,
)
def test_what_it_does_go_with(arguments: list[str]) -> None:
    assert problems(*MINIMAL, *arguments) == []


@pytest.mark.parametrize("backend", ["static", "hf", "auto"])
def test_layers_go_with_every_backend(backend: str) -> None:
    layers = "actor.zero={stage:3,generation_gather:layers}"
    assert problems(*MINIMAL, layers, f"rollout.backend={backend}") == []


def test_states_that_are_on_the_cpu_already_do_not_make_way() -> None:
    moved, offloaded = (
        "actor.zero={offload_states:always,offload_optimizer:true}",
        "critic.zero.offload_optimizer=true",
    )
    line = (
        "actor.zero.offload_states=always: with actor.zero.offload_optimizer=true the states are always on "
        "the CPU"
    )
    for without_critic in ([offloaded], [SHARED], [GRPO, PAIRS]):
        assert found(moved, *without_critic).startswith(line)
    assert problems(*MINIMAL, moved) == []  # the states of the critic can still be moved
    both = "actor.zero={offload_states:auto,offload_optimizer:true}"
    assert problems(*MINIMAL, both, offloaded) == []
    assert problems(*MINIMAL, "actor.zero.offload_states=always", offloaded) == []


def test_the_ranks_share_the_texts_beside_ppo() -> None:
    line = found(PTX, "algo.ptx={coef:1,batch_size:3}", ranks=2)
    assert line == "algo.ptx.batch_size=3: must be divisible by the number of ranks, 2"
    compose(*MINIMAL, PTX, "algo.ptx={coef:1,batch_size:4}", ranks=2)


def test_copies_of_the_weights_need_groups_of_equal_size() -> None:
    setting = "critic.deepspeed.zero_optimization.zero_hpz_partition_size"
    sharded = (*MINIMAL, "rollout.prompts_per_step=24", "critic.zero.stage=3")
    assert complaints(*sharded, f"+{setting}=8", ranks=12) == [
        f"{setting}=8: must divide the number of ranks, 12; use one of 1, 2, 3, 4, 6, 12"
    ]
    for size in (0, 1, 4, 12, 16):  # one group, if there are fewer ranks
        assert problems(*sharded, f"+{setting}={size}", ranks=12) == []
    assert problems(*MINIMAL, f"+{setting}=3", ranks=4) == []  # only ZeRO-3 makes copies
    for wrong in ("-1", "eight", "true", "null", "2.0"):
        assert complaints(*sharded, f"+{setting}={wrong}", ranks=12) == [
            f"{setting}={wrong}: must be a number of ranks; set it to the number of GPUs on a node"
        ]


def test_several_problems_are_reported_together() -> None:
    lines = complaints(
        *MINIMAL,
        "algo.epoch=3",
        "actor.optim.lr=fast",
        "algo.minibatch_size=5",
        "data.path=/nowhere/a.jsonl",
        "sampling.top_p=2",
    )
    assert [line.split(":")[0].split("=")[0] for line in lines] == [
        "actor.optim.lr",
        "sampling.top_p",
        "algo.epoch",
        "algo.minibatch_size",
        "data.path",
    ]


def test_nothing_is_concluded_from_a_value_that_is_wrong_itself() -> None:
    assert (
        found("rollout.prompts_per_step=many", "algo.minibatch_size=5")
        == "rollout.prompts_per_step=many: must be a whole number"
    )


def test_a_misplaced_key_does_not_hide_that_the_right_one_is_missing() -> None:
    assert [line.split(":")[0] for line in complaints(*MINIMAL[:-1], "steps=4")] == [
        "steps=4",
        "run.steps is missing",
    ]


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "../model", "~/no-such-model", "a/b/c"])
def test_a_model_that_looks_local_must_be_there(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()  # without files nearby that could be suggested
    monkeypatch.chdir(tmp_path / "here")
    assert ": no such folder" in found(f"actor.model.path={path}")
    part = "reward.parts.q.reward"
    lines = complaints(
        *(argument for argument in MINIMAL if not argument.startswith("reward")),
        "reward=weighted",
        f"{part}._target_=ppo_ds.rewards.model.model_reward",
        f"{part}.model.path={path}",
    )
    assert lines == [f"{part}.model.path={path}: no such folder"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("outputs/sft/modle", "outputs/sft/model"),
        ("./outputs/stf/model", "outputs/sft/model"),
        ("ouputs/sft/modell/", "outputs/sft/model"),
        ("./outputs/sfft", "outputs/sft/model"),  # a run directory: the model in it
        ("outputs/sft/", "outputs/sft/model"),
        ("models/qwen2.5_0.5b", "models/qwen2.5-0.5b"),  # not sent to the Hub
    ],
)
def test_an_existing_model_is_suggested_for_a_misspelled_one(
    path: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for folder in ("outputs/sft/model", "models/qwen2.5-0.5b", "models/llama"):
        model_folder(tmp_path / folder)
    assert f"; did you mean {meant}?" in found(f"actor.model.path={path}")


def test_a_name_is_one_of_the_hub_unless_a_similar_folder_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    similar = "actor.model.path=Qwen/Qwen2.5-0.5B"
    model_folder(tmp_path / "Qwen" / "Llama")
    (tmp_path / "Qwen" / "Qwen2.5-0.5B-logs").mkdir()  # no model
    compose(*MINIMAL, similar)
    model_folder(tmp_path / "Qwen" / "Qwen2.5-7B")
    assert found(similar) == (
        "actor.model.path=Qwen/Qwen2.5-0.5B: no such folder; did you mean Qwen/Qwen2.5-7B? (a Hub model "
        "whose name is similar to a local folder must be in the cache first: hf download Qwen/Qwen2.5-0.5B)"
    )
    (tmp_path / "cache" / "models--Qwen--Qwen2.5-0.5B").mkdir(parents=True)
    compose(*MINIMAL, similar)


def test_an_existing_file_is_suggested_for_a_misspelled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    assert found("data.path=promts.jsonl") == (
        "data.path=promts.jsonl: no such file; did you mean prompts.jsonl?"
    )
    assert found(f"data.path={tmp_path}/prompt.jsonl").endswith(f"; did you mean {tmp_path}/prompts.jsonl?")


def test_a_misspelled_file_of_a_reward_is_told_with_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").touch()
    assert found("reward=function", "reward.path=scor.py:fn") == (
        "reward.path=scor.py:fn: no such file; did you mean score.py?"
    )
    more = [
        "+reward@eval.rewards.other=function",
        "eval.rewards.other.path=none/a.py:fn",
        "data.eval_path=a/b",
    ]
    assert found(*more) == "eval.rewards.other.path=none/a.py:fn: no such file"
    compose(*MINIMAL, "reward=function", "reward.path=score.py:fn")


@pytest.mark.parametrize("path", ["gpt2", "org/name"])
def test_a_hub_id_is_not_looked_for_here(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose(*MINIMAL, f"actor.model.path={path}", f"data.path={path}").reference.model.path == path


@pytest.mark.parametrize("path", ["/nowhere/train.jsonl", "train.jsonl", "data/train.parquet"])
def test_a_data_file_must_be_there(path: str) -> None:
    assert found(f"data.path={path}") == f"data.path={path}: no such file"


def test_a_reference_that_is_not_loaded_need_not_be_there() -> None:
    other = ("reference.model.path=/nowhere/ref", "algo.kl.place=none")
    compose(*MINIMAL, *other)
    assert found(*other, "algo.kl.after_update=true") == "reference.model.path=/nowhere/ref: no such folder"


def test_every_path_is_looked_at(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    compose(*MINIMAL, f"actor.model.path={folder}")
    lines = complaints(
        *MINIMAL[3:],
        f"actor.model.path={tmp_path}",
        "reward=model",
        "reward.model.path=/nowhere/r",
        "critic.init=path",
        "critic.model.path=/nowhere/c",
        "reference.model.path=/nowhere/ref",
        "data.eval_path=/nowhere/e.jsonl",
    )
    meant = f"; did you mean {folder}?"
    assert f"actor.model.path={tmp_path}: not a model folder (no config.json in it){meant}" in lines
    assert {line.split("=")[0] for line in lines} == {
        "actor.model.path",
        "reward.model.path",
        "critic.model.path",
        "reference.model.path",
        "data.eval_path",
    }


def test_what_prepare_makes_need_not_be_there_yet(tmp_path: Path) -> None:
    prepare = ("++prepare._target_=pkg.make", f"++prepare.dir={tmp_path}/start")
    compose(
        *MINIMAL, *prepare, f"actor.model.path={tmp_path}/start/model", f"data.path={tmp_path}/start/a.jsonl"
    )
    assert "no such file" in found(*prepare, f"data.path={tmp_path}/other.jsonl")


def test_a_used_run_directory_is_refused_only_with_resume_never(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert compose(*MINIMAL, f"run.dir={tmp_path}").run.dir == str(tmp_path)
    assert "has been used already, and run.resume=never" in found(f"run.dir={tmp_path}", "run.resume=never")
    compose(*MINIMAL, f"run.dir={tmp_path}/new", "run.resume=never")
    assert "run.resume=/nowhere: no such checkpoint folder" in found("run.resume=/nowhere")
    assert "is a file" in found(f"run.dir={tmp_path}/metrics.jsonl")


def test_a_start_that_is_no_checkpoint_is_told_which_are_near(tmp_path: Path) -> None:
    run, root = tmp_path / "a", tmp_path / "a" / "checkpoints"
    for step in ("step_000004", "step_000006", "step_1000000"):
        (root / step).mkdir(parents=True)
        (root / step / "manifest.json").touch()
    (root / "step_000007.old").mkdir()
    names, newest = "step_000004, step_000006, step_1000000", root / "step_1000000"
    assert (
        found(f"run.resume={run}")
        == f"run.resume={run}: is a run directory, not a checkpoint; it has {names}; use {newest}"
    )
    assert (
        found(f"run.resume={root}")
        == f"run.resume={root}: is a folder of checkpoints, not a checkpoint; it has {names}; use {newest}"
    )
    for missing in (root / "step_000005", run / "step_000005"):
        assert (
            found(f"run.resume={missing}")
            == f"run.resume={missing}: no such checkpoint folder; {root} has {names}"
        )
    assert compose(*MINIMAL, f"run.resume={root}/step_000006").run.resume == f"{root}/step_000006"


def test_what_is_left_open_follows_from_other_keys() -> None:
    config = compose(
        *MINIMAL,
        "actor.model.dtype=fp32",
        "actor.model.revision=main",
        "rollout.samples_per_prompt=2",
        "run.name=mine",
        "critic.model.dtype=bf16",
    )
    assert config.run.dir == "outputs/mine" and config.tracker.wandb.name == "mine"
    assert config.algo.minibatch_size == 32
    assert (config.reference.model.path, config.reference.model.dtype, config.reference.model.revision) == (
        "org/actor",
        "fp32",
        "main",
    )
    assert (config.critic.model.path, config.critic.model.dtype) == (None, "bf16")
    other = compose(*MINIMAL, "actor.model.revision=main", "reference.model.path=org/other")
    assert (other.reference.model.path, other.reference.model.revision) == ("org/other", None)


PARTS = [
    "algo=gdpo",
    "rollout.samples_per_prompt=4",
    "reward=weighted",
    *("reward@reward.parts.a.reward=format", "reward@reward.parts.b.reward=format"),
]


@pytest.mark.parametrize(
    "setting",
    [
        "algo.kl.place=reward",
        "algo.reward_shaping.clip=5",
        "algo.reward_shaping.normalize=first",
        "algo.reward_shaping.missing_eos=set",
        "algo.reward_shaping.overlong_buffer=4",
        "algo.reward_shaping.length_penalty=0.1",
        "algo.dynamic_sampling.enabled=true",
    ],
)
def test_an_estimator_of_several_rewards_refuses_what_changes_their_total(setting: str) -> None:
    plain = [argument for argument in MINIMAL if not argument.startswith("reward")]
    assert problems(*plain, *PARTS) == []
    (line,) = complaints(*plain, *PARTS, setting)
    assert line.startswith(f"{setting}: cannot be combined with algo.advantage.estimator=gdpo, which uses")
    (line,) = complaints(*plain, *PARTS, "reward.parts.b.weight=0")
    assert line.startswith("algo.advantage.estimator=gdpo: normalizes the parts of a reward one by one")


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("kl_coef=0.05", "TRL's kl_coef is algo.kl.coef"),
        ("num_ppo_epochs=4", "TRL's num_ppo_epochs is algo.epochs"),
        ("lam=0.95", "TRL's lam is algo.gae.lam"),
        ("learning_rate=1e-6", "TRL's learning_rate is actor.optim.lr and critic.optim.lr"),
        (
            "actor.kl_loss_coef=0.1",
            "verl's actor_rollout_ref.actor.kl_loss_coef is algo.kl.coef with algo.kl.place=loss",
        ),
        ("kl_loss_type=k1", "verl's actor_rollout_ref.actor.kl_loss_type is algo.kl.estimator"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "verl's algorithm.kl_ctrl.kl_coef is algo.kl.coef"),
        ("rollout.n=4", "verl's actor_rollout_ref.rollout.n is rollout.samples_per_prompt"),
        ("rollout.batch_size=4", "OpenRLHF's rollout.batch_size is rollout.prompts_per_step"),
        (
            "train_batch_size=4",
            "verl's data.train_batch_size is rollout.prompts_per_step; OpenRLHF's train_batch_size is "
            "algo.minibatch_size",
        ),
        ("max_answer_seq_len=9", "DeepSpeed-Chat's max_answer_seq_len is sampling.max_new_tokens"),
        # names of this package, and keys that are nearly right
        ("seed=1", "did you mean run.seed?"),
        ("algo.lam=0.9", "did you mean algo.gae.lam?"),
        ("algo.kl.coeff=1", "did you mean algo.kl.coef?"),
    ],
)
def test_a_setting_of_another_system_gets_the_key_that_corresponds_to_it(argument: str, hint: str) -> None:
    assert found(argument) == f"{argument.replace('1e-6', '1e-06')}: no such key; {hint}"


def test_arguments_of_a_reward_are_not_compared_with_other_systems() -> None:
    (line,) = complaints(*MINIMAL, "reward.kl_coef=1")
    assert "TRL" not in line
