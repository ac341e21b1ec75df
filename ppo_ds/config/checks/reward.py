"""Checks `reward` and `prepare`, the sections with a `_target_`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ppo_ds.config.checks.data import is_prepared
from ppo_ds.config.schema import ENVIRONMENT_REWARD, TEACHER, Config, PPOConfig, all_rewards, uses_environment
from ppo_ds.config.signatures import misused_targets
from ppo_ds.config.similar_paths import did_you_mean_path
from ppo_ds.config.types import parts_of

# `_target_` of a reward with only token scores -> words for the reward and its scores in error lines
TOKEN_REWARDS = {ENVIRONMENT_REWARD: ("environment", "turns"), TEACHER: ("teacher", "tokens")}


def check_reward(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each mistake in rewards, and any reward shaping that token rewards exclude."""
    if config.reward and not config.reward.get("_target_"):
        yield (
            "reward._target_ is missing: choose a kind of reward first (reward=model, reward=function, "
            "...; --help lists them)"
        )
    yield from misused_targets(config.reward, "reward")
    for key, section in all_rewards(config).items():
        # check the Python file of each reward, at any depth
        for at, part in parts_of(section, key):
            source = str(part.get("path")).rpartition(":")[0]
            missing = source.endswith(".py") and not Path(source).expanduser().is_file()
            if missing and not is_prepared(source, config):
                yield f"{at}.path={part['path']}: no such file{did_you_mean_path(source)}"
        if uses_environment(section) and config.rollout.environment.path is None:
            yield (
                f"{key}=environment: there is no environment; set rollout.environment.path, or choose "
                "another reward"
            )
    if config.reward.get("_target_") not in TOKEN_REWARDS:
        return
    name, units = TOKEN_REWARDS[config.reward["_target_"]]
    shaping = config.algo.reward_shaping
    if shaping.normalize != "none":
        yield (
            f"algo.reward_shaping.normalize={shaping.normalize}: does not apply to the rewards of {units}, "
            f"which are all scores of reward={name}; set it to none"
        )
    if shaping.missing_eos in ("set", "scale"):
        yield (
            f"algo.reward_shaping.missing_eos={shaping.missing_eos}: does not apply to the rewards of "
            f"{units}, which are all scores of reward={name}; set it to subtract or null"
        )


def check_prepare(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each argument that a `prepare` function of ppo_ds does not accept."""
    yield from misused_targets(config.prepare or {}, "prepare")
