"""Checks the open parts of the config, `reward` and `prepare`."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.config.schema import Config
from ppo_ds.config.signatures import misused_targets


def check_reward(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line if no reward is chosen, and for each argument that ppo_ds's own rewards refuse."""
    if config.reward and not config.reward.get("_target_"):
        yield (
            "reward._target_ is missing: choose a kind of reward first (reward=model, reward=function, "
            "...; --help lists them)"
        )
    yield from misused_targets(config.reward, "reward")


def check_prepare(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each argument that ppo_ds's own `prepare` functions do not accept."""
    yield from misused_targets(config.prepare or {}, "prepare")
