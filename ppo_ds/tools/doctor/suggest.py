"""Suggests config changes that make a run fit into the memory of a GPU.

The changes are evaluated with the memory estimate; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ppo_ds.config.schema import (
    Config,
    ConfigT,
    PPOConfig,
    TrainedConfig,
    has_critic,
    reference_is_base,
    trained_models,
    uses_reference,
)
from ppo_ds.config.text import show
from ppo_ds.config.types import replace
from ppo_ds.planning.budgets import used_budgets
from ppo_ds.planning.run_memory import Estimate

Setting = tuple[str, Any]
WORTHWHILE = 0.98  # a single change is suggested only if it reduces the peak below this fraction
SMALL_BUCKET = 50_000_000  # elements; still large enough to use the bandwidth between GPUs


def with_setting(config: ConfigT, key: str, value: Any) -> ConfigT:
    """Returns a copy of the config with one dotted key set."""

    def updated(section: Any, names: list[str]) -> Any:
        name, rest = names[0], names[1:]
        if isinstance(section, dict):
            return section | {name: updated(section.get(name, {}), rest) if rest else value}
        return replace(section, **{name: updated(getattr(section, name), rest) if rest else value})

    changed: ConfigT = updated(config, key.split("."))
    return changed


def with_settings(config: ConfigT, settings: list[Setting]) -> ConfigT:
    for key, value in settings:
        config = with_setting(config, key, value)
    return config


def suggest_reductions(
    config: Config, estimate: Callable[[Any], Estimate], usable: int, parts: Sequence[int] = ()
) -> tuple[list[tuple[list[Setting], int]], list[Setting], int]:
    """Searches for changes that reduce peak memory; ``parts`` are values of memory.sequence_parallel to try.

    Returns:
        (1) The changes that reduce the peak on their own, each with the resulting peak, lowest peak first.
        (2) Settings that together reduce the peak to ``usable``, or as far as the search can. (3) The peak
        with all settings of (2).
    """
    original, before = config, estimate(config).peak
    single = [(change, estimate(with_settings(config, change)).peak) for change in _reductions(config, parts)]
    single = sorted([each for each in single if each[1] < WORTHWHILE * before], key=lambda each: each[1])
    combined: dict[str, Any] = {}
    peak = before
    while peak > usable:
        trials = [
            (estimate(with_settings(config, change)).peak, i, change)
            for i, change in enumerate(_reductions(config, parts))
        ]
        lowest, _, change = min(trials, default=(peak, 0, []))
        if lowest >= peak:
            break
        combined |= dict(change)
        config, peak = with_settings(config, change), lowest
    for key in reversed(list(combined)):  # drops settings that later settings have made redundant
        fewer = {other: value for other, value in combined.items() if other != key}
        without = estimate(with_settings(original, list(fewer.items()))).peak
        # offloading and buckets of a role are valid only with its ZeRO stage
        role, stage, _ = key.partition(".zero.stage")
        required = stage and any(other.startswith((f"{role}.zero.", f"{role}.deepspeed.")) for other in fewer)
        if without <= peak and not required:
            combined, peak = fewer, without
    return single, list(combined.items()), peak


def _reductions(config: Config, parts: Sequence[int]) -> Iterator[list[Setting]]:
    """Yields changes of one key in the section of a model, in both actor and critic, or in ``memory``.

    A change may make the run slower. It affects at most the last digits of the results.
    """
    roles = {
        name: dict(_role_reductions(role))
        for name, role in trained_models(config).items()
        if name != "critic" or (isinstance(config, PPOConfig) and has_critic(config))
    }
    for name, changes in roles.items():
        for key, value in changes.items():
            yield [(f"{name}.{key}", value)]
    if "critic" in roles:
        actor, critic = roles["actor"], roles["critic"]
        for key in actor.keys() & critic.keys():
            yield [(f"actor.{key}", actor[key]), (f"critic.{key}", critic[key])]
    if isinstance(config, PPOConfig) and uses_reference(config) and not reference_is_base(config):
        if config.reference.zero.stage == 0:
            yield [("reference.zero.stage", 3)]
        if not config.reference.zero.offload_params:
            yield [("reference.zero.offload_params", True)]
    for key, tokens in used_budgets(config).items():
        if tokens > 1:
            yield [(f"memory.{key}", tokens // 2)]
    if isinstance(config, PPOConfig) and config.algo.aux_coef == 0:
        memory = config.memory
        if memory.layout != "padded" and memory.reuse_forwards != "all":
            for part in parts:
                if part > memory.sequence_parallel:
                    yield [("memory.sequence_parallel", part)]


def _role_reductions(role: TrainedConfig) -> Iterator[Setting]:
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


def format_settings(settings: list[Setting]) -> str:
    return " ".join(f"{key}={show(value)}" for key, value in settings)
