"""Prepares a dry run (run.dry_run): two steps on tiny random models, which test that all parts fit together.

A dry run is an ordinary run of a modified config: model paths point to tiny models of the same architectures,
batches are small, and run.dir is another folder. Before anything is loaded, rank 0 runs ``prepare`` of the
modified config, which creates the tiny models.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ppo_ds.commands.entry_points import command
from ppo_ds.config.reading import read
from ppo_ds.config.registry import STAGES, import_target
from ppo_ds.config.schema import Config, PPOConfig, is_partial, resolved, reward_models
from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import save_shrunk
from ppo_ds.storage.run_directory import DRY_RUN_MARKER, dry_run_directory

# MIN_ROWS: fewest prompts, rows or pairs of a step; MAX_SAMPLES: most responses to a prompt
STEPS, MIN_ROWS, MAX_SAMPLES = 2, 4, 4
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS, MAX_DATA_ROWS, MAX_EVAL_PROMPTS = 128, 16, 1000, 8
SHOWN = (
    "dry run: config, data, {reward}architectures and loop work: {steps} steps on {ranks} rank(s), "
    "one checkpoint written and read again"
)
NOT_SHOWN = (
    f"not tested: memory (use {command('doctor')}), speed, the real weights, vLLM (rollout.backend=vllm is "
    "replaced by auto), and whether the model learns; "
)
REMOVED = "its files are removed"
Model = tuple[str, str | None]  # path, revision


def dry_run_dir(config: Config) -> Path:
    """Returns the output folder of the dry run of ``config``, which differs from its run.dir."""
    return dry_run_directory(str(config.run.dir))


def dry_run_config(config: PPOConfig, ranks: int) -> Config:
    tree = _small_run(config)
    data, sampling, algo = tree["data"], tree["sampling"], tree["algo"]
    value, shaping, dynamic = algo["value"], algo["reward_shaping"], algo["dynamic_sampling"]
    samples = min(config.rollout.samples_per_prompt, MAX_SAMPLES)
    prompts = ranks * -(-MIN_ROWS // ranks)
    rollout = prompts * samples
    # if the minibatch is the whole rollout in ``config``, it is here too; otherwise it is half the rollout
    full = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    halved = (config.algo.minibatch_size or full) < full and rollout % 2 == 0
    new_tokens = min(sampling["max_new_tokens"], MAX_NEW_TOKENS)

    tree["rollout"] |= {"prompts_per_step": prompts, "samples_per_prompt": samples}
    if tree["rollout"].pop("vllm", None):  # a dry run uses the CPU, which the installed vLLM may not support
        tree["rollout"]["backend"] = "static" if is_partial(config) else "auto"
    tree["memory"]["sequence_parallel"] = 1  # tiny models may have a single key-value head
    sampling |= {"max_new_tokens": new_tokens, "min_new_tokens": min(sampling["min_new_tokens"], new_tokens)}
    # with a lower limit, more prompts would be dropped than in the real run, and tools might not fit
    if data["long_prompts"] != "drop" and config.rollout.environment.path is None:
        data["max_prompt_tokens"] = min(data["max_prompt_tokens"], MAX_PROMPT_TOKENS)
    algo |= {"minibatch_size": rollout // 2 if halved else rollout, "lag": min(algo["lag"], STEPS)}
    value["warmup_steps"] = min(value["warmup_steps"], STEPS - 1)
    value["pretrain_rollouts"] = min(value["pretrain_rollouts"], 1)
    if shaping["overlong_buffer"]:
        shaping["overlong_buffer"] = min(shaping["overlong_buffer"], new_tokens)
    dynamic["max_rounds"] = min(dynamic["max_rounds"], STEPS)
    if algo["ptx"]["batch_size"]:
        algo["ptx"]["batch_size"] = prompts
    return _checked(tree)


def sft_dry_run_config(config: Config, ranks: int) -> Config:
    tree = _small_run(config)
    sft = tree["sft"]
    # max_tokens does not change, since a lower limit would drop more rows than in the real run
    sft |= {"batch_size": ranks * -(-MIN_ROWS // ranks), "samples": min(sft["samples"], 1)}
    sft["sample_tokens"] = min(sft["sample_tokens"], MAX_NEW_TOKENS)
    return _checked(tree)


def reward_model_dry_run_config(config: Config, ranks: int) -> Config:
    tree = _small_run(config)
    tree["reward_model"]["batch_size"] = ranks * -(-MIN_ROWS // ranks)
    return _checked(tree)


def _small_run(config: Config) -> dict[str, Any]:
    """Returns the settings of ``config`` with tiny models, few rows and two steps in the dry run's folder."""
    folder = dry_run_dir(config)
    # ``prepare`` of the config must create its files in the dry run's folder instead of run.dir
    tree = _moved(resolved(config), str(config.run.dir), str(folder))
    models = distinct_models(tree)
    tiny = {model: str(folder / "models" / f"{i}") for i, model in enumerate(models)}
    tree = _with_tiny_models(tree, tiny)
    tree["run"] |= {"dir": str(folder), "steps": STEPS, "epochs": None, "resume": "never"}
    tree["run"] |= {"stop_at_step": None, "max_minutes": None, "profile": None}
    tree["data"]["max_samples"] = min(tree["data"]["max_samples"] or MAX_DATA_ROWS, MAX_DATA_ROWS)
    exports = config.checkpoint.export_every and STEPS
    tree["checkpoint"] |= {"every": STEPS, "minutes": None, "keep_last": 1, "export_every": exports}
    tree["tracker"]["wandb"]["mode"] = "disabled"
    for tracker in ("tensorboard", "trackio"):
        tree["tracker"][tracker]["enabled"] = False
    tree["eval"] |= {"every": config.eval.every and 1, "max_prompts": MAX_EVAL_PROMPTS}
    tree["prepare"] = {
        "_target_": f"{__name__}.prepare",
        "models": [{**options, "folder": tiny[model]} for model, options in models.items()],
        "first": tree["prepare"],
    }
    return tree


def _checked(tree: dict[str, Any]) -> Config:
    changed, problems = read(Config, tree)
    assert not problems, problems
    return changed


def distinct_models(tree: dict[str, Any]) -> dict[Model, dict[str, Any]]:
    """Maps each distinct model of the run to the arguments of save_shrunk for this model.

    The argument ``key``, for errors, is the first config key that refers to the model.
    """
    roles = [role for role in ("actor", "critic", "reference", "scorer") if role in tree]
    sections = [(f"{role}.model", tree[role]["model"]) for role in roles]
    found: dict[Model, dict[str, Any]] = {}
    rewards = {"reward": tree.get("reward", {})}
    rewards |= {f"eval.rewards.{name}": section for name, section in tree["eval"].get("rewards", {}).items()}
    scoring = [found for key, section in rewards.items() for found in reward_models(section, key)]
    for key, model in [*sections, *scoring]:
        path, revision = model.get("path"), model.get("revision")
        if path and (path, revision) not in found:
            found[path, revision] = {
                "path": path,
                "revision": revision,
                "trust_remote_code": bool(model.get("trust_remote_code")),
                "key": f"{key}.path",
                "language_model": key == "actor.model",
            }
    return found


def _with_tiny_models(section: dict[str, Any], tiny: dict[Model, str]) -> dict[str, Any]:
    """Returns a copy of the section with each model, at any depth, replaced by its tiny model in fp32."""
    copy: dict[str, Any] = {}
    for name, value in section.items():
        copy[name] = _with_tiny_models(value, tiny) if isinstance(value, dict) else value
        if name == "model" and isinstance(value, dict) and "path" in value:
            path = value["path"] and tiny[value["path"], value.get("revision")]
            attention = "eager" if value.get("attn_implementation") == "eager" else "sdpa"
            copy[name] |= {"path": path, "revision": None, "dtype": "fp32", "attn_implementation": attention}
    return copy


def _moved(value: Any, old: str, new: str) -> Any:
    """Returns a copy of ``value`` with the folder ``old`` replaced by ``new``, also in paths below it."""
    if isinstance(value, dict):
        return {name: _moved(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, old, new) for item in value]
    inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
    return new + value[len(old) :] if inside else value


def start_dry_run(config: Config, ranks: int, is_main: bool) -> Config:
    """Empties the folder of the dry run on rank 0, and returns the config to run instead of ``config``.

    Raises UserError if the folder exists and no dry run created it.
    """
    folder = dry_run_dir(config)
    if is_main:
        if folder.exists() and not (folder / DRY_RUN_MARKER).exists():
            raise UserError(
                f"run.dry_run=true: the dry run writes to {folder}, but that folder exists and no dry run "
                "created it; choose another run.name"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / DRY_RUN_MARKER).touch()
    # checks/run.py has refused stages without a dry run
    shrink = import_target(STAGES[config.stage].dry_run or "")
    return shrink(config, ranks)


def prepare(models: list[dict[str, Any]], first: dict[str, Any] | None) -> None:
    """Calls ``first``, the ``prepare`` of the original config, if any; then creates the tiny models."""
    if first:
        bind(first, "prepare")()
    for model in models:
        save_shrunk(**{**model, "folder": Path(model["folder"])})


def finish_dry_run(run: Any, config: Config) -> None:
    """Tests that all ranks can read the checkpoint, prints the results and removes the dry run's folder.

    ``config`` is the config that start_dry_run returned. With run.dry_run=keep the folder is kept.
    """
    path = run.saver.checkpoints.latest()
    assert path is not None, "the dry run has left no checkpoint"
    run.saver.resume(path)
    if run.world.is_main:
        reward = "reward, " if config.stage == "ppo" else ""
        shown = SHOWN.format(reward=reward, steps=run.state.step, ranks=run.world.size)
        kept = config.run.dry_run == "keep"
        print(f"{shown}; {NOT_SHOWN}{f'{config.run.dir} is kept' if kept else REMOVED}", flush=True)
        if not kept:
            shutil.rmtree(str(config.run.dir), ignore_errors=True)
