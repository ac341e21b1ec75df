"""run.dry_run: the same loop on tiny random models of the same architectures, to see that config, data, reward and loop work together.

The dry run is an ordinary run of another config, made here: the models' folders are exchanged for tiny ones, the batches are small, the folder is
another one. What makes the tiny models is the config's ``prepare``, which rank 0 runs before anything is loaded.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from ppo_ds.config.schema import Config, reward_models
from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import save_shrunk

STEPS, PROMPTS, SAMPLES = 2, 4, 4  # PPO steps; prompts of one, at least; answers to each, at most
PROMPT_TOKENS, NEW_TOKENS, DATA_ROWS, EVAL_PROMPTS = 128, 16, 1000, 8
MARK = ".dry_run"  # in folders that may be emptied: a dry run made them
SHOWN = "dry run: config, data, reward, architectures and loop work: {steps} steps on {ranks} rank(s), a checkpoint written and read again"
NOT_SHOWN = "not shown: memory (launch/doctor.py estimates it), speed, the real weights, and whether anything is learned; what it wrote is removed"


def folder_of(config: Config) -> Path:
    """Where the dry run writes; run.dir itself is not touched."""
    return Path(f"{str(config.run.dir).rstrip('/')}_dry")


def dry_run_config(config: Config, ranks: int) -> Config:
    """The config of the dry run of ``config``: fp32, two steps, a few short answers, no wandb."""
    run, folder = config.run, folder_of(config)
    config = _moved(config, str(run.dir), str(folder))
    models = _models(config)
    places = {original: str(folder / "models" / f"{i}") for i, original in enumerate(models)}
    wanted = [{**model, "folder": places[original]} for original, model in models.items()]
    reward = _exchanged(config.reward, places)
    data, sampling, algo = config.data, config.sampling, config.algo
    prompts, samples = ranks * -(-PROMPTS // ranks), min(config.rollout.samples_per_prompt, SAMPLES)
    longest = min(sampling.max_new_tokens, NEW_TOKENS)
    return replace(
        config,
        run=replace(
            run,
            dir=str(folder),
            steps=STEPS,
            epochs=None,
            resume="never",
            stop_at_step=None,
            max_minutes=None,
        ),
        actor=replace(config.actor, model=_tiny(config.actor.model, places)),
        critic=replace(config.critic, model=_tiny(config.critic.model, places)),
        reference=replace(config.reference, model=_tiny(config.reference.model, places)),
        rollout=replace(config.rollout, prompts_per_step=prompts, samples_per_prompt=samples),
        sampling=replace(
            sampling, max_new_tokens=longest, min_new_tokens=min(sampling.min_new_tokens, longest)
        ),
        data=replace(
            data,
            max_samples=min(data.max_samples or DATA_ROWS, DATA_ROWS),
            max_prompt_tokens=_prompt_tokens(config),
        ),
        algo=replace(
            algo,
            minibatch_size=_minibatch(config, prompts * samples),
            lag=min(algo.lag, STEPS),
            value=replace(
                algo.value,
                warmup_steps=min(algo.value.warmup_steps, STEPS - 1),
                pretrain_rollouts=min(algo.value.pretrain_rollouts, 1),
            ),
            reward_shaping=replace(
                algo.reward_shaping,
                overlong_buffer=algo.reward_shaping.overlong_buffer
                and min(algo.reward_shaping.overlong_buffer, longest),
            ),
            dynamic_sampling=replace(
                algo.dynamic_sampling, max_rounds=min(algo.dynamic_sampling.max_rounds, STEPS)
            ),
            ptx=replace(algo.ptx, batch_size=algo.ptx.batch_size and prompts),
        ),
        checkpoint=replace(config.checkpoint, every=STEPS, keep_last=1),
        tracker=replace(config.tracker, wandb=replace(config.tracker.wandb, mode="disabled")),
        eval=replace(config.eval, every=config.eval.every and 1, max_prompts=EVAL_PROMPTS),
        reward=reward,
        prepare={"_target_": f"{__name__}.prepare", "models": wanted, "first": config.prepare},
    )


def _minibatch(config: Config, rollout: int) -> int:
    """The whole small rollout where it was the whole large one, else half of it."""
    large = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    halves = (config.algo.minibatch_size or large) < large and rollout % 2 == 0
    return rollout // 2 if halves else rollout


def _prompt_tokens(config: Config) -> int:
    """Shorter prompts cost less, but those that are dropped for their length must not be more than before."""
    return (
        config.data.max_prompt_tokens
        if config.data.long_prompts == "drop"
        else min(config.data.max_prompt_tokens, PROMPT_TOKENS)
    )


Model = tuple[str, str | None]  # path, revision


def _models(config: Config) -> dict[Model, dict[str, Any]]:
    """What the run reads models from, each once, and how to load their configs; the first key that names one is the one that errors name."""
    sections: list[tuple[str, Any]] = [
        ("actor.model", config.actor.model),
        ("critic.model", config.critic.model),
    ]
    sections += [("reference.model", config.reference.model), *reward_models(config.reward)]
    found: dict[Model, dict[str, Any]] = {}
    for key, section in sections:
        model = section if isinstance(section, dict) else asdict(section)
        if model.get("path"):
            trust = bool(model.get("trust_remote_code"))
            about = {
                "path": model["path"],
                "revision": model.get("revision"),
                "trust_remote_code": trust,
                "key": f"{key}.path",
            }
            found.setdefault(
                (model["path"], model.get("revision")), about | {"language_model": key == "actor.model"}
            )
    return found


def _tiny(model: Any, places: dict[Model, str]) -> Any:
    path = places.get((model.path, model.revision)) if model.path else model.path
    return replace(
        model, path=path, revision=None, dtype="fp32", attn_implementation=_on_cpu(model.attn_implementation)
    )


def _on_cpu(attention: str) -> str:
    return attention if attention == "eager" else "sdpa"


def _exchanged(section: dict[str, Any], places: dict[Model, str]) -> dict[str, Any]:
    """A reward's section with the tiny models in it, however deep."""
    made: dict[str, Any] = {}
    for name, inner in section.items():
        if isinstance(inner, dict) and name == "model" and isinstance(inner.get("path"), str):
            made[name] = inner | {
                "path": places[inner["path"], inner.get("revision")],
                "revision": None,
                "dtype": "fp32",
                "attn_implementation": "sdpa",
            }
        else:
            made[name] = _exchanged(inner, places) if isinstance(inner, dict) else inner
    return made


def _moved(value: Any, old: str, new: str) -> Any:
    """``value`` with every text that is the folder ``old``, or a path below it, at ``new``: what ``prepare`` makes in run.dir it makes elsewhere."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _moved(item, old, new) for name, item in vars(value).items()})
    if isinstance(value, dict):
        return {name: _moved(item, old, new) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, old, new) for item in value)
    inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
    return new + value[len(old) :] if inside else value


def begin(config: Config, ranks: int, is_main: bool) -> Config:
    """The config to run instead. Rank 0 empties the folder first, before the ranks meet; what no dry run has made is not touched."""
    folder = folder_of(config)
    if is_main:
        if folder.exists() and not (folder / MARK).exists():
            raise UserError(
                f"run.dry_run=true: writes to {folder}, which is there already and holds something else; choose another run.name"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).touch()
    return dry_run_config(config, ranks)


def prepare(models: list[dict[str, Any]], first: dict[str, Any] | None) -> None:
    """The config's own ``prepare``, then the tiny models."""
    if first:
        bind(first, "prepare")()
    for model in models:
        save_shrunk(**{**model, "folder": Path(model["folder"])})


def conclude(run: Any, config: Config) -> None:
    """After fit(), on all ranks: the checkpoint is read again, what was shown is said, and the folder goes. ``config``: of ``begin``."""
    path = run.checkpoints.latest()
    assert path is not None, "the dry run has left no checkpoint"
    run.resume(path)
    if run.world.is_main:
        print(f"{SHOWN.format(steps=run.state.step, ranks=run.world.size)}; {NOT_SHOWN}", flush=True)
        shutil.rmtree(str(config.run.dir), ignore_errors=True)
