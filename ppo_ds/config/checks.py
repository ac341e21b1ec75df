"""Checks a whole config: rules between keys, and files on this machine, before anything is loaded.

Each rule yields one line for each problem; all problems are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, LOSS_AGGREGATIONS, POLICY_LOSSES
from ppo_ds.config.resume import unknown_names, unusable_start
from ppo_ds.config.schema import (
    Config,
    from_tree,
    has_critic,
    inherit,
    learns_values,
    reward_models,
    rollout_size,
    uses_reference,
)
from ppo_ds.config.text import show
from ppo_ds.errors import UserError
from ppo_ds.secrets import secrets_in

FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow")
MODEL_FILES = ("config.json", "adapter_config.json")
# DeepSpeed settings that the trainer makes itself -> the keys to use instead
SET_BY_TRAINER = {
    "optimizer": "{}.optim (AdamW)",
    "scheduler": "{}.optim.schedule",
    "train_batch_size": "rollout.prompts_per_step and algo.minibatch_size",
    "train_micro_batch_size_per_gpu": "memory.train_tokens",
    "gradient_accumulation_steps": "algo.minibatch_size and memory.train_tokens",
    "gradient_clipping": "{}.optim.grad_clip",
    "fp16": "{}.model.dtype",
    "bf16": "{}.model.dtype",
}


def validated(tree: dict[str, Any], world_size: int) -> Config:
    """Returns the complete Config of a plain nested dict. Raises UserError with every problem in it."""
    if secrets := list(secrets_in(tree)):  # Reported alone, since other lines would print them.
        raise UserError(*secrets)
    config, wrong = from_tree(tree)
    config = inherit(config)
    # A rule that reads a key with a wrong value would report a second, misleading problem.
    known = {re.split(r"[#\[]", key)[0] for key in wrong} & set(dotted_keys(Config))
    named = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in known) or r"(?!)")
    follow_ups = [line for line in problems(config, world_size) if not named.search(line)]
    if wrong or follow_ups:
        raise UserError(*wrong.values(), *follow_ups)
    return config


def problems(config: Config, world_size: int) -> Iterator[str]:
    """Yields a line for every problem between keys or with the file system.

    Each line names all the keys that it depends on.
    """
    yield from _length(config)
    yield from _batches(config, world_size)
    yield from _roles(config)
    yield from _kl(config)
    yield from _algo(config)
    yield from _critic(config)
    yield from _groups(config)
    yield from _data(config, world_size)
    yield from _evaluation(config)
    yield from _paths(config)
    yield from _run_directory(config)


def _length(config: Config) -> Iterator[str]:
    run, sampling = config.run, config.sampling
    if run.steps is None and run.epochs is None:
        yield "run.steps is missing: the number of PPO steps (or run.epochs: passes over the prompts)"
    if run.steps is not None and run.epochs is not None:
        yield f"run.steps={run.steps} and run.epochs={run.epochs:g} are both set; set one of them to null"
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"sampling.min_new_tokens={sampling.min_new_tokens}: must be at most "
            f"sampling.max_new_tokens={sampling.max_new_tokens}"
        )
    if sampling.min_new_tokens and sampling.stop:
        yield (
            f"sampling.min_new_tokens={sampling.min_new_tokens}: delays end tokens, but not the strings of "
            "sampling.stop; set only one of the two"
        )
    if sampling.top_p == 0:
        yield "sampling.top_p=0: must be above 0 (1 is off)"
    if "" in sampling.stop:
        yield f"sampling.stop={show(sampling.stop)}: must not contain an empty string"
    if config.tracker.samples < -1:
        yield f"tracker.samples={config.tracker.samples}: must be at least -1 (-1: all rows)"


def _batches(config: Config, world_size: int) -> Iterator[str]:
    prompts, samples, minibatch = (
        config.rollout.prompts_per_step,
        config.rollout.samples_per_prompt,
        config.algo.minibatch_size,
    )
    rollout = rollout_size(config)
    if prompts % world_size:
        below = prompts - prompts % world_size
        fits = " or ".join(str(n) for n in (below, below + world_size) if n)
        yield (
            f"rollout.prompts_per_step={prompts}: must be divisible by the number of ranks, {world_size}; "
            f"nearest that fit: {fits}"
        )
        world_size = 1  # Then the minibatch is compared with the rollout only.
    if minibatch is not None and (rollout % minibatch or minibatch % world_size):
        fitting = [n for n in range(world_size, rollout + 1, world_size) if rollout % n == 0]
        nearest = [
            max((n for n in fitting if n < minibatch), default=None),
            min((n for n in fitting if n > minibatch), default=None),
        ]
        ranks = f" and be divisible by the number of ranks, {world_size}" if world_size > 1 else ""
        yield (
            f"algo.minibatch_size={minibatch}: must divide the rollout of {rollout} samples "
            f"(rollout.prompts_per_step={prompts} x "
            f"rollout.samples_per_prompt={samples}){ranks}; nearest that fit: "
            f"{' or '.join(str(n) for n in nearest if n)}"
        )


def _roles(config: Config) -> Iterator[str]:
    for name, zero in (("actor", config.actor.zero), ("critic", config.critic.zero)):
        if zero.offload_optimizer and zero.stage == 0:
            yield f"{name}.zero.offload_optimizer=true: needs {name}.zero.stage 1, 2 or 3 (it is 0)"
        if zero.offload_params and zero.stage != 3:
            yield f"{name}.zero.offload_params=true: needs {name}.zero.stage 3 (it is {zero.stage})"
    yield from _generation(config)
    for name, lora in (("actor", config.actor.lora), ("critic", config.critic.lora)):
        for key in ("alpha", "targets", "lr"):
            if not lora.rank and getattr(lora, key) is not None:
                yield f"{name}.lora.{key}={show(getattr(lora, key))}: only used with {name}.lora.rank above 0"
    for name, raw in (("actor", config.actor.deepspeed), ("critic", config.critic.deepspeed)):
        for key, instead in SET_BY_TRAINER.items():
            if key in raw:
                yield (
                    f"{name}.deepspeed.{key}={show(raw[key])}: is set by the trainer; use "
                    f"{instead.format(name)} instead"
                )
        raw_zero = raw.get("zero_optimization")
        if isinstance(raw_zero, dict) and "stage" in raw_zero:
            yield (
                f"{name}.deepspeed.zero_optimization.stage={show(raw_zero['stage'])}: use {name}.zero.stage, "
                "which also decides how the weights are loaded"
            )
    critic = config.critic
    if critic.init == "path" and not critic.model.path:
        yield "critic.model.path is missing: critic.init=path loads the critic from it"
    if critic.init != "path" and critic.model.path:
        yield (
            f"critic.model.path={critic.model.path}: only used with critic.init=path (it is {critic.init})"
        )
    if config.reward and not config.reward.get("_target_"):
        yield (
            "reward._target_ is missing: choose a kind of reward first (reward=model, reward=function, "
            "...; --help lists them)"
        )
    if critic.init == "reward" and config.reward and "reward.model" not in dict(reward_models(config.reward)):
        kind = show(config.reward.get("_target_"))
        yield (
            f"critic.init=reward: needs a reward model, but reward._target_={kind} has no reward.model.path"
        )


def _generation(config: Config) -> Iterator[str]:
    zero = config.actor.zero
    if zero.generation_gather != "auto" and zero.stage != 3:
        yield (
            f"actor.zero.generation_gather={zero.generation_gather}: needs actor.zero.stage 3 "
            f"(it is {zero.stage})"
        )
    # The optimizer states of a critic are moved too.
    if (
        zero.offload_states == "always"
        and zero.offload_optimizer
        and (config.critic.zero.offload_optimizer or not has_critic(config))
    ):
        yield (
            "actor.zero.offload_states=always: with actor.zero.offload_optimizer=true the states are "
            "always on the CPU; use auto"
        )


def _kl(config: Config) -> Iterator[str]:
    kl = config.algo.kl
    if kl.controller == "threshold" and (kl.min_coef == 0 or kl.max_coef is None):
        yield (
            "algo.kl.controller=threshold: needs algo.kl.min_coef above 0 and algo.kl.max_coef (for "
            "example 1e-4 and 10), or repeated halving takes the coefficient to 0"
        )
    if kl.controller != "fixed" and kl.coef == 0:
        yield f"algo.kl.coef=0: must be above 0, since algo.kl.controller={kl.controller} multiplies it"
    if kl.controller != "fixed" and kl.max_coef is not None and not kl.min_coef <= kl.coef <= kl.max_coef:
        yield (
            f"algo.kl.coef={kl.coef:g}: must lie between algo.kl.min_coef={kl.min_coef:g} and "
            f"algo.kl.max_coef={kl.max_coef:g}"
        )
    if kl.controller != "fixed" and kl.max_coef is None and kl.coef < kl.min_coef:
        yield f"algo.kl.coef={kl.coef:g}: must be at least algo.kl.min_coef={kl.min_coef:g}"
    if kl.controller == "adaptive" and kl.horizon <= 0.2 * rollout_size(config):
        yield (
            f"algo.kl.horizon={kl.horizon:g}: one step of {rollout_size(config)} samples could take "
            f"algo.kl.coef to 0; must be above {0.2 * rollout_size(config):g} (usual: 10000)"
        )
    if kl.controller != "fixed" and kl.place == "none":
        yield (
            f"algo.kl.controller={kl.controller}: changes a coefficient that algo.kl.place=none does not "
            "use; set algo.kl.place to reward or loss"
        )
    if kl.place == "reward" and not KL_ESTIMATORS[kl.estimator].in_reward:
        yield (
            f"algo.kl.estimator={kl.estimator}: differs from {kl.estimator[:-1]} only in its gradient, so "
            f"it needs algo.kl.place=loss; in the reward use {kl.estimator[:-1]}"
        )


def _algo(config: Config) -> Iterator[str]:
    algo, limit = config.algo, config.sampling.max_new_tokens
    dual_clip = algo.policy.dual_clip
    if dual_clip is not None and dual_clip <= 1:
        yield f"algo.policy.dual_clip={dual_clip:g}: must be above 1, or null to disable it"
    if algo.policy.clip_low >= 1:
        yield (
            f"algo.policy.clip_low={algo.policy.clip_low:g}: must be below 1 (the ratio is clipped to 1 - "
            "clip_low)"
        )
    if POLICY_LOSSES[algo.policy.loss].own_ratio and algo.action_level == "sequence":
        yield (
            f"algo.policy.loss={algo.policy.loss}: has a ratio of its own for whole responses, so "
            "algo.action_level must be token"
        )
    if algo.loss.norm is not None and not LOSS_AGGREGATIONS[algo.loss.agg].needs_norm:
        yield (
            f"algo.loss.norm={algo.loss.norm}: only used with algo.loss.agg=token_sum_norm "
            f"(it is {algo.loss.agg})"
        )
    if algo.rollout_is.kind != "none" and algo.action_level == "sequence":
        yield (
            f"algo.rollout_is.kind={algo.rollout_is.kind}: weights tokens, so algo.action_level must be token"
        )
    if algo.rollout_is.low > algo.rollout_is.high:
        yield (
            f"algo.rollout_is.low={algo.rollout_is.low:g}: must be at most "
            f"algo.rollout_is.high={algo.rollout_is.high:g}"
        )
    if algo.reward_shaping.overlong_buffer is not None and algo.reward_shaping.overlong_buffer > limit:
        yield (
            f"algo.reward_shaping.overlong_buffer={algo.reward_shaping.overlong_buffer:g}: must be at most "
            f"sampling.max_new_tokens={limit}"
        )
    if config.actor.ema.decay == 1:
        yield "actor.ema.decay=1: the average would never change; must be below 1"
    if config.actor.ema.evaluate and config.actor.ema.decay is None:
        yield "actor.ema.evaluate=true: needs averaged weights; set actor.ema.decay (for example 0.99)"


def _critic(config: Config) -> Iterator[str]:
    algo, estimator = config.algo, config.algo.advantage.estimator
    no_values, entry = not learns_values(config), ADVANTAGE_ESTIMATORS[estimator]
    position = algo.value.position
    if position is not None and (position == "token") != (algo.action_level == "token"):
        fits = "token" if algo.action_level == "token" else "prompt_last or response_last"
        yield f"algo.value.position={position}: with algo.action_level={algo.action_level} it must be {fits}"
    if config.critic.lora.rank and not has_critic(config):
        yield (
            f"critic.lora.rank={config.critic.lora.rank}: there is no separate critic to adapt "
            "(see algo.advantage.estimator and critic.share_trunk)"
        )
    if config.critic.init == "path" and no_values:
        yield f"critic.init=path: algo.advantage.estimator={estimator} has no critic to initialize"
    for key, is_set in (
        ("bootstrap_truncated=true", algo.gae.bootstrap_truncated),
        (f"lam_critic={algo.gae.lam_critic}", algo.gae.lam_critic is not None),
    ):
        if is_set and (algo.action_level == "sequence" or no_values):
            yield f"algo.gae.{key}: only used with algo.action_level=token and algo.advantage.estimator=gae"
    if algo.action_level not in entry.action_levels:
        yield (
            f"algo.advantage.estimator={estimator}: gives each token its own return, so "
            "algo.action_level must be token"
        )
    for key, steps in (
        ("warmup_steps", algo.value.warmup_steps),
        ("pretrain_rollouts", algo.value.pretrain_rollouts),
    ):
        if steps and no_values:
            yield (
                f"algo.value.{key}={steps}: algo.advantage.estimator={estimator} has no critic to train; "
                "set it to 0"
            )
        if steps and config.critic.share_trunk:
            yield (
                f"algo.value.{key}={steps}: trains only the critic, and critic.share_trunk=true has no "
                "separate critic; set it to 0"
            )
    if (
        algo.value.warmup_steps
        and config.run.steps is not None
        and algo.value.warmup_steps >= config.run.steps
    ):
        yield (
            f"algo.value.warmup_steps={algo.value.warmup_steps}: leaves no step that trains the actor; "
            f"must be below run.steps={config.run.steps}"
        )
    if config.critic.share_trunk and no_values:
        yield (
            f"critic.share_trunk=true: algo.advantage.estimator={estimator} learns no values; set it to false"
        )
    if config.critic.share_trunk and config.actor.lora.rank:
        yield "critic.share_trunk=true: cannot be used with actor.lora.rank; use a separate critic"


def _groups(config: Config) -> Iterator[str]:
    algo, n = config.algo, config.rollout.samples_per_prompt
    if n > 1:
        return
    for key, value, needs in (
        (
            "algo.advantage.estimator",
            algo.advantage.estimator,
            ADVANTAGE_ESTIMATORS[algo.advantage.estimator].needs_group,
        ),
        ("algo.advantage.whiten", "group", algo.advantage.whiten == "group"),
        ("algo.dynamic_sampling.enabled", "true", algo.dynamic_sampling.enabled),
    ):
        if needs:
            yield (
                f"{key}={value}: compares the responses to one prompt; set rollout.samples_per_prompt "
                f"(it is {n}) to 2 or more, often 8"
            )


def _data(config: Config, world_size: int) -> Iterator[str]:
    data, ptx = config.data, config.algo.ptx
    if data.path is None and not data.mix:
        yield (
            "data.path is missing: a Hub data set or a JSONL, JSON, Parquet or CSV file of prompts (or "
            "data.mix: several of them)"
        )
    if data.path is not None and data.mix:
        yield (
            f"data.path={data.path}: data.mix is set too; add this data set to data.mix, or set data.path "
            "to null"
        )
    if ptx.coef and data.ptx_path is None:
        yield f"algo.ptx.coef={ptx.coef:g}: needs texts in data.ptx_path"
    if ptx.batch_size is not None and not ptx.coef:
        yield f"algo.ptx.batch_size={ptx.batch_size}: only used with algo.ptx.coef above 0"
    if data.ptx_path is not None and not ptx.coef:
        yield f"data.ptx_path={data.ptx_path}: only used with algo.ptx.coef above 0 (InstructGPT: 27.8)"
    texts = ptx.batch_size or config.algo.minibatch_size or rollout_size(config)
    if ptx.coef and texts % world_size:
        yield f"algo.ptx.batch_size={texts}: must be divisible by the number of ranks, {world_size}"


def _evaluation(config: Config) -> Iterator[str]:
    if config.eval.every and not config.data.eval_path:
        yield f"eval.every={config.eval.every}: needs held-out prompts in data.eval_path"
    if config.checkpoint.keep_best and not config.eval.every:
        yield (
            "checkpoint.keep_best=true: the best checkpoint is chosen by evaluation; set eval.every and "
            "data.eval_path"
        )
    if config.health.max_kl and not uses_reference(config):
        yield (
            f"health.max_kl={config.health.max_kl:g}: without a reference no KL is measured; set "
            "algo.kl.place to reward or loss, or health.max_kl to null"
        )


def _paths(config: Config) -> Iterator[str]:
    models = {"actor.model.path": config.actor.model.path, "critic.model.path": config.critic.model.path}
    models |= {f"{key}.path": model["path"] for key, model in reward_models(config.reward)}
    if uses_reference(config) and config.reference.model.path != config.actor.model.path:
        models["reference.model.path"] = config.reference.model.path
    for key, path in models.items():
        if path and looks_local(path) and not _prepared(path, config):
            folder = Path(path).expanduser()
            if not folder.exists():
                yield f"{key}={path}: no such folder"
            elif not any((folder / name).is_file() for name in MODEL_FILES):
                yield f"{key}={path}: not a model folder (no config.json in it)"
    data = {
        "data.path": config.data.path,
        "data.eval_path": config.data.eval_path,
        "data.ptx_path": config.data.ptx_path,
    }
    data |= {f"data.mix[{i}].path": part.path for i, part in enumerate(config.data.mix)}
    for key, path in data.items():
        if path and looks_local(path) and not _prepared(path, config) and not Path(path).exists():
            yield f"{key}={path}: no such file"


def looks_local(path: str) -> bool:
    """Returns whether a path is on this machine; a missing `name` or `org/name` is a Hub id."""
    return (
        path.startswith(("/", ".", "~"))
        or path.count("/") > 1
        or path.endswith(FILE_ENDINGS)
        or Path(path).exists()
    )


def _prepared(path: str, config: Config) -> bool:
    """Returns whether `prepare` creates a path: any path, or only those in its `dir` if it has that key."""
    made = (config.prepare or {}).get("dir")
    return config.prepare is not None and (
        not made or Path(path).absolute().is_relative_to(Path(made).absolute())
    )


def _run_directory(config: Config) -> Iterator[str]:
    folder, name = Path(config.run.dir), config.run.name
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        yield (
            f"run.name={show(name)}: must be a single name without /, since it names a folder in outputs/; "
            "to write the run elsewhere, set run.dir"
        )
    if folder.exists() and not folder.is_dir():
        yield f"run.dir={config.run.dir}: is a file; choose a directory"
    elif config.run.resume == "never" and any(
        (folder / used).exists() for used in ("metrics.jsonl", "checkpoints")
    ):
        yield (
            f"run.dir={config.run.dir}: has been used already, and run.resume=never; choose another run.dir "
            "or run.name, or run.resume=auto"
        )
    yield from unknown_names(config)
    yield from unusable_start(config)
