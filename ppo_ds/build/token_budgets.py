"""Resolves the token budgets of the section memory that are ``auto``."""

from __future__ import annotations

from ppo_ds.config.schema import Config, is_unused
from ppo_ds.config.types import replace

# On a CPU, a larger forward is not faster.
LIMITS = {"rollout_tokens": 32768, "score_tokens": 16384, "train_tokens": 8192}


def with_token_budgets(config: Config) -> Config:
    """Returns a copy of the config in which every token budget that the stage uses is a number."""
    used = [name for name in LIMITS if not is_unused(f"memory.{name}", config.stage)]
    numbers = {name: LIMITS[name] for name in used if getattr(config.memory, name) == "auto"}
    return replace(config, memory=replace(config.memory, **numbers)) if numbers else config
