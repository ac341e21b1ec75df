"""Which keys bring a run into the memory of a GPU, and which have room to grow: trials with the estimate. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ppo_ds.config import Config, reference_is_base, uses_reference
from ppo_ds.estimate import Estimate
from ppo_ds.typed import show

Setting = tuple[str, Any]
WORTH = 0.98  # of the peak: what lowers it by less is not named
MOST_DOUBLINGS = 6


def changed(config: Config, key: str, value: Any) -> Config:
    """The same config with one dotted key set."""

    def at(section: Any, names: list[str]) -> Any:
        if isinstance(section, dict):
            return section | {names[0]: at(section.get(names[0], {}), names[1:]) if names[1:] else value}
        return replace(section, **{names[0]: at(getattr(section, names[0]), names[1:]) if names[1:] else value})

    return at(config, key.split("."))


def remedies(config: Config, estimated: Callable[[Config], Estimate], usable: int) -> tuple[list[tuple[Setting, int]], list[Setting], int]:
    """Single settings with the peak that each leaves, the best first; settings that together bring the peak to ``usable``, or as low as they can;
    and that peak."""
    alone = [(setting, estimated(changed(config, *setting)).peak) for setting in _choices(config)]
    before = estimated(config).peak
    alone = sorted([each for each in alone if each[1] < WORTH * before], key=lambda each: each[1])
    together: list[Setting] = []
    peak = before
    while peak > usable:
        tried = [(estimated(changed(config, *setting)).peak, i, setting) for i, setting in enumerate(_choices(config))]
        lowest, _, setting = min(tried, default=(peak, 0, ("", None)))
        if lowest >= peak:
            break
        together = [other for other in together if other[0] != setting[0]] + [setting]
        config, peak = changed(config, *setting), lowest
    return alone, together, peak


def _choices(config: Config) -> Iterator[Setting]:
    """One step further with each key that trades speed, or nothing, for memory. No result hangs on any of them."""
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        zero = section.zero
        yield from ((f"{role}.zero.stage", stage) for stage in (2, 3) if stage > zero.stage)
        if zero.stage and not zero.offload_optimizer:
            yield f"{role}.zero.offload_optimizer", True
        if zero.stage == 3 and not zero.offload_params:
            yield f"{role}.zero.offload_params", True
        if not section.model.gradient_checkpointing:
            yield f"{role}.model.gradient_checkpointing", True
        bucket = section.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size")
        if zero.stage and bucket is None:
            yield f"{role}.deepspeed.zero_optimization.reduce_bucket_size", 50_000_000
    if uses_reference(config) and not reference_is_base(config):
        yield from (("reference.zero.stage", 3) for _ in range(config.reference.zero.stage == 0))
        yield from (("reference.zero.offload_params", True) for _ in range(not config.reference.zero.offload_params))
    for key in ("rollout_tokens", "score_tokens", "train_tokens"):
        now = getattr(config.memory, key)
        if now > 1:
            yield f"memory.{key}", now // 2


def growth(config: Config, estimated: Callable[[Config], Estimate], usable: int) -> list[Setting]:
    """How far each token budget alone could be doubled within ``usable``; those that could, and would make larger forwards."""
    found = []
    for key in ("rollout_tokens", "score_tokens", "train_tokens"):
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
