"""The shapes of all roles of a run, from config.json files alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ppo_ds.build.roles import CLASSIFIER, CriticStart, critic_start
from ppo_ds.config.schema import (
    Config,
    FrozenZeroConfig,
    ModelConfig,
    has_critic,
    reference_is_base,
    uses_reference,
)
from ppo_ds.models.size import planned_shape
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.memory import Shape
from ppo_ds.tools.doctor.estimate import BYTES, Frozen, Models
from ppo_ds.tools.doctor.report import Report


def plan_models(config: Config, tokenizer: Tokenizer | None, report: Report) -> Models | None:
    """From config.json files; None where the actor's cannot be read, or another's that a table without would mislead."""
    before = len(report.lines)
    actor = report.tried(
        "actor", lambda: _actor(config), lambda s: f"{config.actor.model.path}: {_parameters(s)}"
    )
    start = _critic_start(config, tokenizer, report) if has_critic(config) else None
    critic = (
        report.tried("critic", lambda: _critic(config, start), lambda s: f"{start.path}: {_parameters(s)}")
        if start
        else None
    )
    reference = report.tried(
        "reference",
        lambda: _reference(config),
        lambda f: f and f"{config.reference.model.path}: {_parameters(f.shape)}",
    )
    rewards, length = {}, 0
    seen: set[Any] = (
        {_identity(start.reward)} if start and start.reward and config.critic.lora.rank else set()
    )
    for key, model, zero, kind in _reward_models(config.reward, "reward"):
        identity = (_identity(model), zero.stage, zero.offload_params)
        if _identity(model) in seen or identity in seen:
            report.add("reward", f"{key}={model.path}: in memory already")
        elif kind != CLASSIFIER:
            report.add(
                "reward", f"{key}={model.path}: a model with code of its own; its memory is not estimated"
            )
        else:
            shape = report.tried(
                "reward",
                lambda model=model, key=key: _planned(model, key),
                lambda s, m=model: f"{m.path}: {_parameters(s)}",
            )
            if shape is not None:
                rewards[key] = Frozen(shape, BYTES[model.dtype], zero.stage == 3, zero.offload_params)
        seen.add(identity)
    if any(not line.ok for line in report.lines[before:]) or actor is None:
        return None
    return Models(
        actor,
        critic,
        reference,
        rewards,
        length or config.data.max_prompt_tokens + config.sampling.max_new_tokens,
    )


def _actor(config: Config) -> Shape:
    model, lora = config.actor.model, config.actor.lora
    return planned_shape(
        model.path,
        classifier=False,
        trained=True,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attn_implementation,
        lora=(lora.rank, lora.targets) if lora.rank else None,
        value_head=config.critic.share_trunk,
        key="actor.model.path",
    )


def _critic_start(config: Config, tokenizer: Tokenizer | None, report: Report) -> CriticStart | None:
    if tokenizer is None:
        report.add("critic", "what it starts from hangs on the actor's tokenizer", ok=False)
        return None
    return report.tried("critic", lambda: critic_start(config, tokenizer), lambda _: None)


def _critic(config: Config, start: CriticStart) -> Shape:
    lora = config.critic.lora
    return planned_shape(
        start.path,
        classifier=True,
        trained=True,
        revision=start.revision,
        trust_remote_code=start.trust_remote_code,
        attn_implementation=config.critic.model.attn_implementation or "sdpa",
        lora=(lora.rank, lora.targets) if lora.rank else None,
        key=start.key,
    )


def _reference(config: Config) -> Frozen | None:
    model, zero = config.reference.model, config.reference.zero
    if not uses_reference(config) or reference_is_base(config):
        return None
    shape = planned_shape(
        str(model.path),
        classifier=False,
        trained=False,
        revision=model.revision,
        trust_remote_code=bool(model.trust_remote_code),
        attn_implementation=model.attn_implementation or "sdpa",
        key="reference.model.path",
    )
    return Frozen(shape, BYTES[model.dtype or "bf16"], zero.stage == 3, zero.offload_params)


def _reward_models(
    section: dict[str, Any], key: str
) -> Iterator[tuple[str, ModelConfig, FrozenZeroConfig, str]]:
    """Key, model, place and kind of each reward model, however deep."""
    for name, inner in section.items():
        if isinstance(inner, dict) and name == "model" and isinstance(inner.get("path"), str):
            zero = section.get("zero") or {}
            yield (
                f"{key}.model.path",
                ModelConfig(**inner),
                FrozenZeroConfig(**zero),
                str(section.get("_target_")),
            )
        elif isinstance(inner, dict):
            yield from _reward_models(inner, f"{key}.{name}")


def _planned(model: ModelConfig, key: str) -> Shape:
    return planned_shape(
        model.path,
        classifier=True,
        trained=False,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attn_implementation,
        key=key,
    )


def _identity(model: ModelConfig) -> tuple[Any, ...]:
    path = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path
    return path, model.revision, model.dtype, model.attn_implementation


def _parameters(shape: Shape) -> str:
    trained = (
        "" if shape.trained in (0, shape.parameters) else f", {shape.trained / 1e6:.1f} M of them trained"
    )
    return f"{shape.parameters / 1e6:,.1f} M parameters{trained}"
