"""Reads the shapes of all models of a run from their config.json files, without weights."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, cast

from ppo_ds.assemble.roles import CLASSIFIER, critic_start
from ppo_ds.compute.sizes import Shape
from ppo_ds.config.hub_cache import in_hub_cache
from ppo_ds.config.reading import read
from ppo_ds.config.schema import (
    TEACHER,
    Config,
    ConfigT,
    PPOConfig,
    all_rewards,
    has_critic,
    reference_is_base,
    resolved,
    uses_reference,
)
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.config.types import parts_of
from ppo_ds.models.size import planned_own_code_shape, planned_shape
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.planning.ppo_memory import Models
from ppo_ds.planning.run_memory import FrozenModel
from ppo_ds.tools.doctor.report import Report

SHAPES = Path(__file__).parent / "shapes"
# models of conf/model and conf/reward -> folders with the config.json of their shapes
SHIPPED = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": "qwen3-0.6b-score",
    "Skywork/Skywork-Reward-V2-Qwen3-4B": "qwen3-4b-score",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "OpenAssistant/reward-model-deberta-v3-large-v2": "deberta-v3-large",
}


def with_shipped_shapes(config: ConfigT) -> ConfigT:
    """Returns a config with folders of shapes in place of SHIPPED models that are not in the Hub cache."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        shipped = isinstance(value, str) and value in SHIPPED and not in_hub_cache(value)
        return str(SHAPES / SHIPPED[value]) if shipped else value

    return cast(ConfigT, read(Config, replaced(resolved(config)))[0])


def plan_models(config: PPOConfig, tokenizer: Tokenizer | None, report: Report) -> Models | None:
    """Reads the shapes of all roles and reports each shape.

    Returns None if a shape cannot be read, since an estimate without this model would be misleading.
    """
    errors = report.errors
    actor = report.attempt(
        "actor",
        lambda: planned_shape(
            config.actor.model,
            classifier=False,
            trained=True,
            lora=config.actor.lora,
            value_head=config.critic.share_trunk,
            key="actor.model.path",
        ),
        lambda shape: describe_shape(config.actor.model.path, shape),
    )
    critic, initial_reward = _critic(config, tokenizer, report) if has_critic(config) else (None, None)
    reference = report.attempt(
        "reference",
        lambda: _reference(config),
        lambda model: describe_shape(str(config.reference.model.path), model.shape) if model else None,
    )
    loaded = {_identity(initial_reward)} if initial_reward and config.critic.lora.rank else set()
    rewards = _rewards(config, report, loaded)
    if report.errors > errors or actor is None:
        return None
    length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return Models(actor, critic, reference, rewards, length)


def _critic(
    config: PPOConfig, tokenizer: Tokenizer | None, report: Report
) -> tuple[Shape | None, ModelConfig | None]:
    """Returns the critic's shape, and the reward model if the critic starts from it."""
    start = report.attempt("critic", lambda: critic_start(config, tokenizer))
    if start is None:
        return None, None
    shape = report.attempt(
        "critic",
        lambda: planned_shape(
            start.model, classifier=True, trained=True, lora=config.critic.lora, key=start.key
        ),
        lambda shape: describe_shape(start.model.path, shape),
    )
    return shape, start.reward


def _reference(config: PPOConfig) -> FrozenModel | None:
    model, zero = config.reference.model, config.reference.zero
    if not uses_reference(config) or reference_is_base(config):
        return None
    section = ModelConfig(**model.model_dump())
    shape = planned_shape(section, classifier=False, trained=False, key="reference.model.path")
    return FrozenModel.of(shape, model.dtype or "bf16", zero)


def _rewards(config: PPOConfig, report: Report, loaded: set[Any]) -> dict[str, FrozenModel]:
    """Returns the reward models that need memory in addition to the other models, by config key.

    ``loaded`` holds the identities of models that are already in memory; those of the rewards are added.
    """
    rewards = {}
    sections = [found for key, whole in all_rewards(config).items() for found in parts_of(whole, key)]
    for key, section in sections:
        if not (isinstance(given := section.get("model"), dict) and isinstance(given.get("path"), str)):
            continue
        key, model = f"{key}.model.path", ModelConfig(**given)
        zero = FrozenZeroConfig(**section.get("zero") or {})
        identity = (_identity(model), zero.stage, zero.offload_params)
        if _identity(model) in loaded or identity in loaded:
            report.add("reward", f"{key}={model.path}: shares weights that are already in memory")
        else:
            plan = partial(planned_own_code_shape, model, key=key)
            if (target := section.get("_target_")) in (CLASSIFIER, TEACHER):
                plan = partial(planned_shape, model, classifier=target == CLASSIFIER, trained=False, key=key)
            shape = report.attempt("reward", plan, partial(describe_shape, model.path))
            if shape is not None:
                rewards[key] = FrozenModel.of(shape, model.dtype, zero)
        loaded.add(identity)
    return rewards


def _identity(model: ModelConfig) -> tuple[Any, ...]:
    path = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path
    return path, model.revision, model.dtype, model.attn_implementation, model.quantization


def describe_shape(path: str, shape: Shape) -> str:
    partly_trained = shape.trained not in (0, shape.parameters)
    trained = f", {shape.trained / 1e6:.1f} M of them trained" if partly_trained else ""
    return f"{path}: {shape.parameters / 1e6:,.1f} M parameters{trained}"
