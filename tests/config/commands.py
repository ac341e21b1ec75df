"""Helpers that compose a config in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import load_config
from ppo_ds.config.schema import Config
from ppo_ds.errors import UserError

MINIMAL = (
    "actor.model.path=org/actor",
    "reward=function",
    "reward.path=pkg.mod:score",
    "data.path=org/prompts",
    "rollout.prompts_per_step=16",
    "sampling.max_new_tokens=8",
    "run.steps=2",
)


def compose(*arguments: str, ranks: int = 1) -> Config:
    return load_config(list(arguments), world_size=ranks)


def complaints(*arguments: str, ranks: int = 1) -> list[str]:
    """Returns the error lines of an invalid command line."""
    with pytest.raises(UserError) as error:
        load_config(list(arguments), world_size=ranks)
    assert all("\n" not in line for line in error.value.problems)
    return error.value.problems


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path
