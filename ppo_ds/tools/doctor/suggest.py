"""Which keys bring a run into the memory of a GPU, and which have room to grow: trials with the estimate. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ppo_ds.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    has_critic,
    reference_is_base,
    uses_reference,
)
from ppo_ds.config.typed import show
from ppo_ds.tools.doctor.estimate import Estimate

Setting = tuple[str, Any]
WORTH = 0.98  # of the peak: what lowers it by less is not named
MOST_DOUBLINGS = 6
SMALL_BUCKET = 50_000_000  # numbers: large enough to keep the links busy
BUDGETS = ("rollout_tokens", "score_tokens", "train_tokens")


def changed(config: Config, key: str, value: Any) -> Config:
    """The same config with one dotted key set."""

    def at(section: Any, names: list[str]) -> Any:
        if isinstance(section, dict):
            return section | {names[0]: at(section.get(names[0], {}), names[1:]) if names[1:] else value}
        return replace(
            section, **{names[0]: at(getattr(section, names[0]), names[1:]) if names[1:] else value}
        )

    return at(config, key.split("."))


def all_changed(config: Config, settings: list[Setting]) -> Config:
    for setting in settings:
        config = changed(config, *setting)
    return config


def remedies(
    config: Config, estimated: Callable[[Config], Estimate], usable: int
) -> tuple[list[tuple[list[Setting], int]], list[Setting], int]:
    """Single changes with the peak that each leaves, the best first; settings that together bring the peak to ``usable``, or as low as they can;
    and that peak."""
    first, before = config, estimated(config).peak
    alone = [(settings, estimated(all_changed(config, settings)).peak) for settings in _changes(config)]
    alone = sorted([each for each in alone if each[1] < WORTH * before], key=lambda each: each[1])
    together: dict[str, Any] = {}
    peak = before
    while peak > usable:
        tried = [
            (estimated(all_changed(config, settings)).peak, i, settings)
            for i, settings in enumerate(_changes(config))
        ]
        lowest, _, settings = min(tried, default=(peak, 0, []))
        if lowest >= peak:
            break
        together |= dict(settings)
        config, peak = all_changed(config, settings), lowest
    for key in reversed(list(together)):  # what a later one has made needless
        fewer = {other: value for other, value in together.items() if other != key}
        without = estimated(all_changed(first, list(fewer.items()))).peak
        if without <= peak and not _needed(key, fewer):
            together, peak = fewer, without
    return alone, list(together.items()), peak


def _needed(key: str, others: dict[str, Any]) -> bool:
    """Whether what is there for a stage of ZeRO alone, offloading and buckets, would be without it."""
    role, stage, _ = key.partition(".zero.stage")
    return bool(stage) and any(other.startswith((f"{role}.zero.", f"{role}.deepspeed.")) for other in others)


def _changes(config: Config) -> Iterator[list[Setting]]:
    """One step further with each key that trades speed, or nothing, for memory: of the actor, of the critic, of both; and of the rest. No result
    hangs on any of them."""
    actor, critic = dict(_of_role(config.actor)), dict(_of_role(config.critic)) if has_critic(config) else {}
    for key, value in actor.items():
        yield [(f"actor.{key}", value)]
    for key, value in critic.items():
        yield [(f"critic.{key}", value)]
    for key in actor.keys() & critic.keys():
        yield [(f"actor.{key}", actor[key]), (f"critic.{key}", critic[key])]
    if uses_reference(config) and not reference_is_base(config):
        if config.reference.zero.stage == 0:
            yield [("reference.zero.stage", 3)]
        if not config.reference.zero.offload_params:
            yield [("reference.zero.offload_params", True)]
    for key in BUDGETS:
        if (now := getattr(config.memory, key)) > 1:
            yield [(f"memory.{key}", now // 2)]


def _of_role(role: ActorConfig | CriticConfig) -> Iterator[Setting]:
    zero = role.zero
    if zero.stage < 3:
        yield "zero.stage", 2 if zero.stage < 2 else 3
    if zero.stage and not zero.offload_optimizer:
        yield "zero.offload_optimizer", True
    if zero.stage == 3 and not zero.offload_params:
        yield "zero.offload_params", True
    if not role.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True
    if zero.stage and "reduce_bucket_size" not in role.deepspeed.get("zero_optimization", {}):
        yield "deepspeed.zero_optimization.reduce_bucket_size", SMALL_BUCKET


def growth(config: Config, estimated: Callable[[Config], Estimate], usable: int) -> list[Setting]:
    """How far each token budget alone could be doubled within ``usable``; those that could, and would make larger forwards."""
    found = []
    for key in BUDGETS:
        value, most = getattr(config.memory, key), None
        before = estimated(config)
        for _ in range(MOST_DOUBLINGS):
            value *= 2
            after = estimated(changed(config, f"memory.{key}", value))
            if after.peak > usable or after.phases == before.phases:
                break
            most, before = value, after
        if most is not None:
            found.append((f"memory.{key}", most))
    return found


def spelled(settings: list[Setting]) -> str:
    return " ".join(f"{key}={show(value)}" for key, value in settings)
