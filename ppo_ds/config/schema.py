"""Defines the config of a run. The modules in sections/ define each key once, with type, range, default and
description.

`from_tree` makes a Config from a plain nested dict, `inherit` fills in what follows from other keys, and
`resolved` is the nested dict that config.yaml shows. The open parts (`reward`, `prepare`) are a `_target_`
and its keyword arguments, which targets.py checks against the callable's signature. Batch sizes are global:
they mean the same with any number of ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ppo_ds.config.reading import read
from ppo_ds.config.registry import ADVANTAGE_ESTIMATORS, STAGES
from ppo_ds.config.sections.algo import AlgoConfig
from ppo_ds.config.sections.data import DataConfig, RolloutConfig, SamplingConfig
from ppo_ds.config.sections.models import (
    ActorConfig,
    CriticConfig,
    InheritedModelConfig,
    ModelConfig,
    ReferenceConfig,
)
from ppo_ds.config.sections.run import (
    CheckpointConfig,
    EvalConfig,
    HealthConfig,
    MemoryConfig,
    RunConfig,
    TrackerConfig,
)
from ppo_ds.config.types import OneOf, Section, replace


class Config(Section):
    """Every setting of a run."""

    stage: Annotated[str, OneOf(STAGES)] = Field("ppo", description="Kind of training.")
    run: RunConfig
    actor: ActorConfig
    critic: CriticConfig
    reference: ReferenceConfig
    rollout: RolloutConfig
    sampling: SamplingConfig
    data: DataConfig
    algo: AlgoConfig
    memory: MemoryConfig
    checkpoint: CheckpointConfig
    health: HealthConfig
    tracker: TrackerConfig
    eval: EvalConfig
    reward: dict[Any, Any] = Field(
        description="The reward: reward=model reward.model.path=..., or reward=function "
        "reward.path=pkg.mod:fn."
    )
    prepare: dict[Any, Any] | None = Field(
        None,
        description="A function that creates models or data, in its `dir`, before anything is loaded.",
    )


def from_tree(tree: Any) -> tuple[Config, dict[str, str]]:
    """Makes a Config from a plain nested dict; the second value maps the keys that are wrong to lines.

    With problems, the Config has stand-ins for the wrong values, so that other checks can go on.
    """
    return read(Config, tree)


def default_dir(name: str) -> str:
    """Returns the run directory of a run that names none."""
    return f"outputs/{name}"


def inherit(config: Config) -> Config:
    """Fills in every key whose value follows from other keys."""
    run, data, wandb = config.run, config.data, config.tracker.wandb
    actor = replace(config.actor.model, path=_expand(config.actor.model.path))
    mix = [
        replace(
            part,
            path=_expand(part.path),
            split=part.split or data.split,
            prompt_column=part.prompt_column or data.prompt_column,
        )
        for part in data.mix
    ]
    paths = {name: _expand(getattr(data, name)) for name in ("path", "eval_path", "ptx_path")}
    return replace(
        config,
        run=replace(run, dir=_expand(run.dir or default_dir(run.name)), resume=_expand(run.resume)),
        actor=replace(config.actor, model=actor),
        critic=replace(config.critic, model=_inherited(config.critic.model, actor, path=None)),
        reference=replace(config.reference, model=_inherited(config.reference.model, actor, path=actor.path)),
        data=replace(data, mix=mix, **paths),
        algo=replace(config.algo, minibatch_size=config.algo.minibatch_size or rollout_size(config)),
        tracker=replace(config.tracker, wandb=replace(wandb, name=wandb.name or run.name)),
    )


def _inherited(model: InheritedModelConfig, actor: ModelConfig, path: str | None) -> InheritedModelConfig:
    """Fills the null keys of a model with the actor's; another model has its own revision and its own
    code.
    """
    same = actor.model_dump() | {"path": path}
    if model.path is not None:
        same |= {"path": _expand(model.path), "revision": None, "trust_remote_code": False}
    own = {name: value for name, value in model if value is not None and name != "path"}
    return InheritedModelConfig.model_construct(**same | own)


def _expand(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def resolved(config: Config) -> dict[str, Any]:
    """Returns the config as the plain nested dict that config.yaml shows: tuples as lists, nothing left
    to inherit.
    """
    return _plain(inherit(config).model_dump())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- what a config decides


def rollout_size(config: Config) -> int:
    """Returns the samples of one PPO step, over all ranks."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def uses_reference(config: Config) -> bool:
    """Returns whether a run measures the KL to the reference; otherwise no reference is loaded."""
    return config.algo.kl.place != "none" or config.algo.kl.after_update


def learns_values(config: Config) -> bool:
    """Returns whether values are learned, by a critic or by a value head on the actor."""
    return ADVANTAGE_ESTIMATORS[config.algo.advantage.estimator].needs_critic


def has_critic(config: Config) -> bool:
    """Returns whether there is a critic with its own weights; otherwise no critic is loaded."""
    return learns_values(config) and not config.critic.share_trunk


def reference_is_base(config: Config) -> bool:
    """Returns whether the reference is the actor without its adapters, so that no weights are loaded."""
    actor, reference = config.actor.model, config.reference.model
    alike = ("path", "revision", "dtype", "attn_implementation")
    return config.actor.lora.rank > 0 and all(
        getattr(reference, name) == getattr(actor, name) for name in alike
    )


def reward_models(section: dict[str, Any], key: str = "reward") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key and the section of each model in a reward, at any depth of a mixture."""
    for name, inner in section.items():
        if isinstance(inner, dict):
            if name == "model" and isinstance(inner.get("path"), str):
                yield f"{key}.model", inner
            yield from reward_models(inner, f"{key}.{name}")


def value_position(algo: AlgoConfig) -> str:
    """Returns where a value is taken: algo.value.position, or its default for the action level."""
    return algo.value.position or ("prompt_last" if algo.action_level == "sequence" else "token")
