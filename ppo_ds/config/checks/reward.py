"""Checks the open parts of the config, `reward` and `prepare`."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.config.schema import Config, all_rewards, uses_environment
from ppo_ds.config.signatures import misused_targets


def check_reward(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line if no reward is chosen, and for each argument that ppo_ds's own rewards refuse."""
    if config.reward and not config.reward.get("_target_"):
        yield (
            "reward._target_ is missing: choose a kind of reward first (reward=model, reward=function, "
            "...; --help lists them)"
        )
    yield from misused_targets(config.reward, "reward")


def check_environment_reward(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each reward that reads the rewards of an environment if there is none."""
    for key, section in all_rewards(config).items():
        if uses_environment(section) and config.rollout.environment.path is None:
            yield (
                f"{key}=environment: there is no environment; set rollout.environment.path, or choose "
                "another reward"
            )


def check_prepare(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each argument that ppo_ds's own `prepare` functions do not accept."""
    yield from misused_targets(config.prepare or {}, "prepare")
