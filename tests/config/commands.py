"""Provides helpers for tests that compose a config."""

from __future__ import annotations

from pathlib import Path

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


def problems(*arguments: str, ranks: int = 1) -> list[str]:
    """Returns the error lines of a command line, [] for a valid one."""
    try:
        load_config(list(arguments), world_size=ranks)
    except UserError as error:
        assert all("\n" not in line for line in error.problems)
        return error.problems
    return []


def complaints(*arguments: str, ranks: int = 1) -> list[str]:
    """Returns the error lines of an invalid command line."""
    lines = problems(*arguments, ranks=ranks)
    assert lines, "the command line is valid"
    return lines


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path
