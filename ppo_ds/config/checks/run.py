"""Checks the section run: length, dry run, name, directory, profile and resumption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ppo_ds.config.registry import STAGES
from ppo_ds.config.resume import unknown_names, unusable_start
from ppo_ds.config.schema import Config
from ppo_ds.config.text import show


def check_run(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each unusable or missing value of the section run."""
    if config.run.steps is None and config.run.epochs is None:
        yield "run.steps is missing: the number of training steps (or run.epochs: passes over the data)"
    if config.run.dry_run and STAGES[config.stage].dry_run is None:
        yield f"run.dry_run=true: stage={config.stage} has no dry run; set it to false"
    assert config.run.dir is not None and config.run.name is not None, "filled in when the config is read"
    folder, name = Path(config.run.dir), config.run.name
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        yield (
            f"run.name={show(name)}: must be a single name without /, since it names a folder in outputs/; "
            "to write the run elsewhere, set run.dir"
        )
    if folder.exists() and not folder.is_dir():
        yield f"run.dir={config.run.dir}: is a file; choose a directory"
    elif config.run.resume == "never" and any(
        (folder / used).exists() for used in ("metrics.jsonl", "checkpoints")
    ):
        yield (
            f"run.dir={config.run.dir}: has been used already, and run.resume=never; choose another run.dir "
            "or run.name, or set run.resume=auto or run.resume=restart"
        )
    yield from late_profile(config, config.run.steps)
    yield from unknown_names(config)
    yield from unusable_start(config)


def late_profile(config: Config, steps: int | None) -> Iterator[str]:
    """Yields an error line if the run, of ``steps`` steps (None: unknown), ends before step run.profile."""
    last = min(filter(None, (steps, config.run.stop_at_step)), default=None)
    if config.run.profile and last and config.run.profile > last:
        yield f"run.profile={config.run.profile}: the run ends with step {last}; choose an earlier one"
