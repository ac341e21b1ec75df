"""Defines the config of a run.

The modules in sections/ define each key once, with type, range, default and description.

`from_tree` makes a Config from a plain nested dict, `inherit` fills in the keys whose values follow from
other keys, and `resolved` returns the nested dict that config.yaml shows. Each open part (`reward`,
`prepare`) consists of a `_target_` and its keyword arguments, which targets.py checks against the callable's
signature. Batch sizes are global: they mean the same with any number of ranks.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, create_model

from ppo_ds.config.reading import read
from ppo_ds.config.registry import ADVANTAGE_ESTIMATORS, STAGES
from ppo_ds.config.renamed import leaves
from ppo_ds.config.sections.algo import AlgoConfig
from ppo_ds.config.sections.data import DataConfig, RolloutConfig, SamplingConfig
from ppo_ds.config.sections.finetune import RewardModelConfig, SFTConfig
from ppo_ds.config.sections.models import (
    ActorConfig,
    CriticConfig,
    InheritedModelConfig,
    ModelConfig,
    ReferenceConfig,
    ScorerConfig,
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
    """Every setting of every stage. The config of a run is of the class that config_class returns."""

    stage: Annotated[str, OneOf(STAGES)] = Field("ppo", description="Kind of training.")
    run: RunConfig
    actor: ActorConfig
    critic: CriticConfig
    reference: ReferenceConfig
    scorer: ScorerConfig
    rollout: RolloutConfig
    sampling: SamplingConfig
    data: DataConfig
    algo: AlgoConfig
    sft: SFTConfig
    reward_model: RewardModelConfig
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


# The keys of Config that every stage has. The stage's entry in registry.STAGES lists the others that it uses.
SHARED = ("stage", "run", "checkpoint", "health", "tracker", "eval", "prepare")
WEIGHTED_REWARD = "ppo_ds.rewards.weighted.WeightedReward"  # `_target_` of reward=weighted
LORA_FACTOR = 10.0  # learning rate of adapters / learning rate of all weights
ENVIRONMENT_REWARD = "ppo_ds.rewards.environment.EnvironmentReward"
OPEN_PARTS = ("reward", "prepare")  # Keys of Config that hold a `_target_` and its arguments.
# Endings of the metrics of an evaluation whose lowest value is the best; see checkpoint.best_mode.
LOWER_IS_BETTER = ("/loss", "/perplexity", "/ties", "/calibration_error", "_std")


def config_class(stage: Any) -> type[Config]:
    """Returns a class like Config with only the sections that a stage uses; Config for an unknown stage."""
    if str(stage) not in STAGES:
        return Config
    return _class_with(frozenset({*SHARED, *STAGES[str(stage)].sections}))


@cache  # since two configs of a stage can only be equal if they have the same class
def _class_with(sections: frozenset[str]) -> type[Config]:
    if sections == Config.model_fields.keys():
        return Config
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in Config.model_fields.items() if name in sections
    }
    return cast(type[Config], create_model("Config", __base__=Section, **fields))


def is_unused(key: str, stage: str) -> bool:
    """Returns whether a stage does not use a key; its section may be one that the stage has."""
    if key.split(".")[0] not in config_class(stage).model_fields:
        return True
    return stage in STAGES and any(fnmatchcase(key, pattern) for pattern in STAGES[stage].unused_keys)


def from_tree(tree: Any) -> tuple[Config, dict[str, str]]:
    """Makes a Config from a plain nested dict; also returns a mapping from wrong keys to error lines.

    The Config has only the sections of its stage. Wrong values are replaced by valid ones, so that the other
    checks can continue.
    """
    stage = tree.get("stage", "ppo")
    own = config_class(stage)
    foreign = Config.model_fields.keys() - own.model_fields.keys()
    config, wrong = read(own, {name: value for name, value in tree.items() if name not in foreign})
    sections = ", ".join(name for name in own.model_fields if name != "stage")
    return config, wrong | {
        name: f"{name}: stage={stage} does not use this section; remove its keys (it uses {sections})"
        for name, value in tree.items()
        # a group such as algo=standard or zero=stage3 may leave an empty section
        if name in foreign and any(item not in (None, {}) for _, item in leaves(value))
    }


def default_dir(name: str) -> str:
    """Returns the default of run.dir."""
    return f"outputs/{name}"


def inherit(config: Config) -> Config:
    """Fills in every key whose value follows from other keys."""
    sections, run, tracker = type(config).model_fields, config.run, config.tracker
    name = config.stage if run.name is None else run.name
    run_dir = _expand(run.dir or default_dir(name))
    filled: dict[str, Any] = {
        "run": replace(run, name=name, dir=run_dir, resume=_expand(run.resume)),
        "tracker": replace(
            tracker,
            wandb=replace(tracker.wandb, name=tracker.wandb.name or name),
            trackio=replace(tracker.trackio, name=tracker.trackio.name or name),
        ),
    }
    if config.eval.patience is not None:  # a run that stops early must have kept its best checkpoint
        filled["checkpoint"] = replace(config.checkpoint, keep_best=True)
    if "actor" in sections:
        actor = replace(config.actor.model, path=_expand(config.actor.model.path))
        filled["actor"] = replace(config.actor, model=actor)
    if "critic" in sections:
        critic = _inherited(config.critic.model, actor, path=None)
        filled["critic"] = replace(config.critic, model=critic)
    if "reference" in sections:
        reference = _inherited(config.reference.model, actor, path=actor.path)
        filled["reference"] = replace(config.reference, model=reference)
    if "scorer" in sections:
        scorer = replace(config.scorer.model, path=_expand(config.scorer.model.path))
        filled["scorer"] = replace(config.scorer, model=scorer)
    if "data" in sections:
        filled["data"] = _inherited_data(config.data)
    if "algo" in sections:
        minibatch_size = config.algo.minibatch_size or rollout_size(config)
        filled["algo"] = replace(config.algo, minibatch_size=minibatch_size)
    return replace(config, **filled)


def _inherited(model: InheritedModelConfig, actor: ModelConfig, path: str | None) -> InheritedModelConfig:
    """Fills the null keys of a model with the actor's values.

    A model with its own path does not inherit the actor's revision and trust_remote_code.
    """
    same = actor.model_dump() | {"path": path}
    if model.path is not None:
        same |= {"path": _expand(model.path), "revision": None, "trust_remote_code": False}
    own = {name: value for name, value in model if value is not None and name != "path"}
    return InheritedModelConfig.model_construct(**same | own)


def _inherited_data(data: DataConfig) -> DataConfig:
    """Expands ~ in the paths, and fills the null keys of each data set of a mixture from the data section."""
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
    return replace(data, mix=mix, **paths)


def _expand(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def resolved(config: Config) -> dict[str, Any]:
    """Returns the config as the plain nested dict that config.yaml shows.

    Inherited values are filled in, and tuples are converted to lists.
    """
    return _plain(inherit(config).model_dump())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- properties of a config


def rollout_size(config: Config) -> int:
    """Returns the number of samples in one PPO step, over all ranks."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def best_metric(config: Config) -> str:
    """Returns the metric of the evaluation that selects the best checkpoint."""
    return config.checkpoint.best_by or STAGES[config.stage].eval_metrics[0]


def lower_is_better(config: Config) -> bool:
    """Returns whether the lowest value of the metric that selects the best checkpoint is the best."""
    mode = config.checkpoint.best_mode
    return mode == "min" or (mode == "auto" and best_metric(config).endswith(LOWER_IS_BETTER))


def all_rewards(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the sections of all rewards of a PPO run by their keys, the reward of the training first."""
    more = {f"eval.rewards.{name}": section for name, section in config.eval.rewards.items()}
    return {"reward": config.reward} | more


def reward_weights(config: Config) -> dict[str, Any]:
    """Returns the weights of the parts of a weighted reward that are not 0; {} for other rewards."""
    if config.reward.get("_target_") != WEIGHTED_REWARD:
        return {}
    parts = config.reward.get("parts") or {}
    weights = {name: part.get("weight", 1.0) for name, part in parts.items()}
    return {name: weight for name, weight in weights.items() if weight}


def uses_environment(section: dict[str, Any]) -> bool:
    """Returns whether a reward, at any depth of a mixture, reads the rewards of the environment."""
    return section.get("_target_") == ENVIRONMENT_REWARD or any(
        uses_environment(inner) for inner in section.values() if isinstance(inner, dict)
    )


TrainedConfig = ActorConfig | CriticConfig | ScorerConfig


def trained_models(config: Config) -> dict[str, TrainedConfig]:
    """Returns the sections of the models that the stage can train, by their names."""
    sections = type(config).model_fields
    return {name: getattr(config, name) for name in ("actor", "critic", "scorer") if name in sections}


def learning_rate(role: TrainedConfig) -> float:
    """Returns the learning rate of a model after the warm-up: that of its adapters, if it has any.

    With actor.lora.lr=auto, adapters get ten times the rate of full training, which is best for both
    supervised fine-tuning and reinforcement learning in "LoRA Without Regret" (Schulman et al. 2025).
    """
    if not role.lora.rank or role.lora.lr is None:
        return role.optim.lr
    return LORA_FACTOR * role.optim.lr if role.lora.lr == "auto" else float(role.lora.lr)


def averaged_models(config: Config) -> dict[str, ActorConfig | ScorerConfig]:
    """Returns the sections of the models that may have averaged weights, by their names."""
    sections = type(config).model_fields
    return {name: getattr(config, name) for name in ("actor", "scorer") if name in sections}


def main_model_path(config: Config) -> str:
    """Returns the path of the model that the stage is for: the actor, or the scorer."""
    return str(next(iter(averaged_models(config).values())).model.path)


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
    """Returns whether the reference is the actor without its adapters, so that it loads no weights."""
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
    """Returns the position of the values: algo.value.position, or its default for the action level."""
    return algo.value.position or ("prompt_last" if algo.action_level == "sequence" else "token")
