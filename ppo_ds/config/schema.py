"""Defines the config of a run.

The modules in sections/ define each key once, with type, range, default and description. Each stage has a
class that lists its sections.

`read(Config, tree)` makes a Config from a plain nested dict. `inherit` fills in the keys whose values follow
from other keys. `resolved` returns the nested dict for config.yaml. The open parts `reward` and `prepare`
consist of a `_target_` and its keyword arguments, which targets.py checks against the signature of the
target. Batch sizes are global: they do not depend on the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic.fields import FieldInfo

from ppo_ds.algorithm.credit.keys import AdvantageConfig
from ppo_ds.algorithm.policy.keys import PolicyConfig
from ppo_ds.config.registry import STAGES, import_target, where_import_failed
from ppo_ds.config.sections.algo import AlgoConfig
from ppo_ds.config.sections.data import DataConfig, PPODataConfig, SamplingConfig
from ppo_ds.config.sections.finetune import RewardModelConfig, SFTConfig
from ppo_ds.config.sections.models import (
    ActorConfig,
    CriticConfig,
    InheritedModelConfig,
    ModelConfig,
    PPOActorConfig,
    ReferenceConfig,
    ScorerConfig,
)
from ppo_ds.config.sections.run import (
    CheckpointConfig,
    EvalConfig,
    GenerationMemoryConfig,
    HealthConfig,
    MemoryConfig,
    PPOEvalConfig,
    PPOHealthConfig,
    PPOMemoryConfig,
    RunConfig,
    TrackerConfig,
)
from ppo_ds.config.text import show
from ppo_ds.config.types import OneOf, Variants, leaves, parts_of, replace
from ppo_ds.errors import UserError
from ppo_ds.rollout.keys import PartialRollouts, RolloutConfig

TrainedConfig = ActorConfig | CriticConfig
ConfigT = TypeVar("ConfigT", bound="Config")
TrainedT = TypeVar("TrainedT", bound=ActorConfig)
CONFIGS: dict[str, type[Config]] = {}  # the config of each stage
# The order of sections in config.yaml, in messages and in the docs
ORDER = (
    *("stage", "run", "actor", "critic", "reference", "scorer", "rollout", "sampling", "data", "algo", "sft"),
    *("reward_model", "memory", "checkpoint", "health", "tracker", "eval", "reward", "prepare"),
)


class Config(Variants):
    """The settings that every stage has."""

    tag = "stage"
    variants = CONFIGS
    trained: ClassVar[tuple[str, ...]] = ()  # names of the models that the stage can train
    averaged: ClassVar[tuple[str, ...]] = ()  # the models in ``trained`` that may have averaged weights

    stage: Annotated[str, OneOf(CONFIGS)] = "ppo"
    """Kind of training."""

    run: RunConfig
    checkpoint: CheckpointConfig
    health: HealthConfig
    tracker: TrackerConfig
    eval: EvalConfig

    prepare: dict[Any, Any] | None = None
    """A function that creates models or data in its `dir` before anything is loaded."""

    @classmethod
    def all_fields(cls) -> dict[str, FieldInfo]:
        fields = super().all_fields()
        return {name: fields[name] for name in (*ORDER, *fields) if name in fields}

    def inherited(self) -> dict[str, Any]:
        """Returns, by name, the sections that inherit values from other keys, with these values filled in."""
        return {}

    @classmethod
    def foreign(cls, key: str, value: Any, default: Any) -> Iterator[str]:
        """Yields the error lines about ``key``, which the config sets but only other stages use.

        A section at the top level gets one line, unless it is empty. A ``key`` inside a section gets a line
        for each value at or below it, unless ``value`` equals ``default``.
        """
        stage = cls.model_fields["stage"].default
        if "." in key:
            for path, item in leaves(value):
                if value != default:
                    name = ".".join([key, *map(str, path)])
                    yield f"{name}={show(item)}: stage={stage} does not use this key; remove it"
        # a group such as algo=standard or zero=stage3 may leave an empty section
        elif any(item not in (None, {}) for _, item in leaves(value)):
            sections = ", ".join(name for name in ORDER if name in cls.model_fields and name != "stage")
            yield f"{key}: stage={stage} does not use this section; remove its keys (it uses {sections})"


class TextConfig(Config):
    """The settings of a stage that trains on texts."""

    data: DataConfig
    memory: MemoryConfig

    def inherited(self) -> dict[str, Any]:
        paths = {name: _expand(getattr(self.data, name)) for name in ("path", "eval_path")}
        return {"data": replace(self.data, **paths)}


class PPOConfig(TextConfig):
    """The settings of PPO, GRPO and other policy gradient methods."""

    trained = ("actor", "critic")
    averaged = ("actor",)
    stage: Literal["ppo"] = "ppo"
    actor: PPOActorConfig
    critic: CriticConfig
    reference: ReferenceConfig
    rollout: RolloutConfig
    sampling: SamplingConfig
    data: PPODataConfig
    algo: AlgoConfig
    memory: PPOMemoryConfig
    health: PPOHealthConfig
    eval: PPOEvalConfig

    reward: dict[Any, Any]
    """The reward: reward=model reward.model.path=..., or reward=function reward.path=pkg.mod:fn."""

    def inherited(self) -> dict[str, Any]:
        actor, data = _with_own_path(self.actor), self.data
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
        reference = _inherited(self.reference.model, actor.model, path=actor.model.path)
        critic = replace(self.critic.model, quantization=self.critic.model.quantization or "none")
        learned = any(reward_models(self.reward))  # a learned score has no threshold of correctness
        return {
            "eval": replace(self.eval, correct_above=None) if learned else self.eval,
            "actor": actor,
            "critic": replace(self.critic, model=_inherited(critic, actor.model, path=None)),
            "reference": replace(self.reference, model=reference),
            "data": replace(data, mix=mix, **paths),
            "algo": replace(self.algo, minibatch_size=self.algo.minibatch_size or rollout_size(self)),
        }


class SFTStageConfig(TextConfig):
    """The settings of supervised fine-tuning."""

    trained = averaged = ("actor",)
    stage: Literal["sft"] = "sft"
    actor: ActorConfig
    sft: SFTConfig
    memory: GenerationMemoryConfig

    def inherited(self) -> dict[str, Any]:
        return super().inherited() | {"actor": _with_own_path(self.actor)}


class RewardModelStageConfig(TextConfig):
    """The settings of the training of a reward model."""

    trained = averaged = ("scorer",)
    stage: Literal["reward_model"] = "reward_model"
    scorer: ScorerConfig
    reward_model: RewardModelConfig

    def inherited(self) -> dict[str, Any]:
        return super().inherited() | {"scorer": _with_own_path(self.scorer)}


WEIGHTED_REWARD = "ppo_ds.rewards.weighted.WeightedReward"  # `_target_` of reward=weighted
LORA_FACTOR = 10.0  # learning rate of adapters / learning rate of full training
ENVIRONMENT_REWARD = "ppo_ds.rewards.environment.EnvironmentReward"
TEACHER = "ppo_ds.rewards.teacher.TeacherReward"
OPEN_PARTS = ("reward", "prepare")  # Keys of Config that hold a `_target_` and its arguments.
# Suffixes of evaluation metrics whose lowest value is the best; see checkpoint.best_mode.
LOWER_IS_BETTER = ("/loss", "/perplexity", "/ties", "/calibration_error", "_std")


# Keys whose value may also be package.module.name of the user's code -> the section
OPEN_VARIANTS: dict[str, type[Variants]] = {
    "algo.policy.loss": PolicyConfig,
    "algo.advantage.estimator": AdvantageConfig,
    "rollout.backend": RolloutConfig,
}


def own_code(tree: Any) -> list[tuple[str, dict[str, Any], str]]:
    """Returns (key, its section, name) for each unknown variant name in ``tree``, which may be user code."""
    found = []
    for key, variants in OPEN_VARIANTS.items():
        *path, tag = key.split(".")
        section = tree
        for inner in path:
            section = section.get(inner) if isinstance(section, dict) else None
        name = section.get(tag) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(name, str) and name not in variants.variants:
            found.append((key, section, name))
    return found


def load_own_code(tree: Any) -> None:
    """Imports the user code that ``tree`` names, and adds it as variants. ``tree`` must be trusted."""
    for key, _, name in own_code(tree):
        if "." in name:
            try:
                target = import_target(name)
            except Exception as error:  # raised by the user's module
                problem = f"{type(error).__name__}: {error}{where_import_failed(error)}"
                raise UserError(
                    f"{key}={name}: cannot be imported, {problem}; must be package.module.name"
                ) from error
            add_own_code(key, name, target, name)


def add_own_code(key: str, name: str, target: Any, path: str) -> None:
    """Makes ``name`` a value of ``key`` that selects the code ``target`` at ``path``. May raise UserError."""
    variants, problem = OPEN_VARIANTS[key], ""
    if isinstance(target, type):
        if variants.interface is not None and not issubclass(target, variants):
            problem = f"is not derived from {variants.__name__}"
    elif variants.interface is None:
        problem = "is not a class"
    else:
        arguments, result = variants.interface
        try:
            inspect.signature(target).bind(*arguments)
        except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
            problem = f"must be a function ({', '.join(arguments)}) -> {result}: {error}"
    if problem:
        raise UserError(f"{key}={name}: {problem}")
    variants.add(name, target, path)


def default_dir(name: str) -> str:
    return f"outputs/{name}"


def inherit(config: ConfigT) -> ConfigT:
    """Fills in the values of all keys that follow from other keys."""
    run, tracker = config.run, config.tracker
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
    if config.eval.patience is not None:  # a run that stops early must keep its best checkpoint
        filled["checkpoint"] = replace(config.checkpoint, keep_best=True)
    return replace(config, **filled, **config.inherited())


def _with_own_path(role: TrainedT) -> TrainedT:
    return replace(role, model=replace(role.model, path=_expand(role.model.path)))


def _inherited(model: InheritedModelConfig, actor: ModelConfig, path: str | None) -> InheritedModelConfig:
    """Fills the null keys of a model with the actor's values, and a null path with ``path``.

    A model with its own path does not inherit the actor's revision and trust_remote_code.
    """
    same = actor.model_dump() | {"path": path}
    if model.path is not None:
        same |= {"path": _expand(model.path), "revision": None, "trust_remote_code": False}
    own = {name: value for name, value in model if value is not None and name != "path"}
    return InheritedModelConfig.model_construct(**same | own)


def _expand(path: str | None) -> str | None:
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def resolved(config: Config) -> dict[str, Any]:
    """Returns the nested dict for config.yaml, with inherited values, and lists instead of tuples."""
    values = inherit(config).model_dump()
    return {name: _plain(values[name]) for name in type(config).all_fields()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- properties of a config


def rollout_size(config: PPOConfig) -> int:
    """Returns the number of samples in one PPO step, over all ranks."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def is_partial(config: PPOConfig) -> bool:
    """Returns whether responses that have not ended in a step are continued in the next step."""
    return isinstance(config.rollout, PartialRollouts) and config.rollout.partial


def decoded_rows(config: PPOConfig, ranks: int) -> int:
    """Returns the number of responses that one rank generates at a time."""
    section, prompts = config.rollout, config.rollout.prompts_per_step / ranks
    if isinstance(section, PartialRollouts) and section.partial:
        prompts *= section.oversample
    return ceil(prompts) * section.samples_per_prompt


def best_metric(config: Config) -> str:
    return config.checkpoint.best_by or STAGES[config.stage].eval_metrics[0]


def lower_is_better(config: Config) -> bool:
    """Returns whether the best checkpoint is the one with the lowest value of the metric."""
    mode = config.checkpoint.best_mode
    return mode == "min" or (mode == "auto" and best_metric(config).endswith(LOWER_IS_BETTER))


def all_rewards(config: PPOConfig) -> dict[str, dict[str, Any]]:
    """Maps the config keys of all rewards of a PPO run to their sections; the training's reward is first."""
    more = {f"eval.rewards.{name}": section for name, section in config.eval.rewards.items()}
    return {"reward": config.reward} | more


def extra_rewards(config: Config) -> dict[str, dict[str, Any]]:
    """Maps the names of additional evaluation rewards to their sections; {} for stages other than PPO."""
    return config.eval.rewards if isinstance(config, PPOConfig) else {}


def reward_weights(config: PPOConfig) -> dict[str, Any]:
    """Returns the nonzero weights of the parts of a weighted reward; {} for other rewards."""
    if config.reward.get("_target_") != WEIGHTED_REWARD:
        return {}
    parts = config.reward.get("parts") or {}
    weights = {name: part.get("weight", 1.0) for name, part in parts.items()}
    return {name: weight for name, weight in weights.items() if weight}


def uses_environment(section: dict[str, Any]) -> bool:
    """Returns whether a reward, or any part of a mixture, uses the rewards of the environment."""
    return any(part.get("_target_") == ENVIRONMENT_REWARD for _, part in parts_of(section, ""))


def trained_models(config: Config) -> dict[str, TrainedConfig]:
    """Maps the names of the models that the stage can train to their sections."""
    return {name: getattr(config, name) for name in config.trained}


def learning_rate(role: TrainedConfig) -> float:
    """Returns the learning rate of a model after the warm-up: that of its adapters, if it has any.

    With lora.lr=auto, adapters get ten times the rate of full training, which is best for supervised
    fine-tuning and reinforcement learning in "LoRA Without Regret" (Schulman et al. 2025).
    """
    if not role.lora.rank or role.lora.lr is None:
        return role.optim.lr
    return LORA_FACTOR * role.optim.lr if role.lora.lr == "auto" else float(role.lora.lr)


def averaged_models(config: Config) -> dict[str, ActorConfig]:
    """Maps the names of the models that may have averaged weights to their sections."""
    return {name: getattr(config, name) for name in config.averaged}


def main_model_path(config: Config) -> str:
    """Returns the path of the stage's main model: the actor or the scorer."""
    return str(next(iter(averaged_models(config).values())).model.path)


def uses_reference(config: PPOConfig) -> bool:
    """Returns whether a run measures the KL to a reference. If not, no reference is loaded."""
    return config.algo.kl.place != "none" or config.algo.kl.after_update


def learns_values(config: PPOConfig) -> bool:
    """Returns whether values are trained, in a critic or in a value head on the actor."""
    return config.algo.advantage.needs_critic


def has_critic(config: PPOConfig) -> bool:
    """Returns whether there is a critic with separate weights. If not, no critic is loaded."""
    return learns_values(config) and not config.critic.share_trunk


def reference_is_base(config: PPOConfig) -> bool:
    """Returns whether the reference is the actor without its adapters and needs no weights."""
    actor, reference = config.actor.model, config.reference.model
    alike = ("path", "revision", "dtype", "attn_implementation", "quantization")
    return config.actor.lora.rank > 0 and all(
        getattr(reference, name) == getattr(actor, name) for name in alike
    )


def reward_models(section: dict[str, Any], key: str = "reward") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the config key and the section of each model in a reward, at any depth of a mixture."""
    for at, part in parts_of(section, key):
        if at != key and at.endswith(".model") and isinstance(part.get("path"), str):
            yield at, part


def value_position(algo: AlgoConfig) -> str:
    """Returns algo.value.position, or the default position of the values for the action level."""
    return algo.value.position or ("prompt_last" if algo.action_level == "sequence" else "token")
