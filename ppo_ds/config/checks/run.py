"""Checks the sections that every stage has: length, run directory, checkpoints and dry run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ppo_ds.config.registry import STAGES
from ppo_ds.config.resume import unknown_names, unusable_start
from ppo_ds.config.schema import Config
from ppo_ds.config.text import show


def check_length(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line unless exactly one of run.steps and run.epochs is set."""
    run = config.run
    if run.steps is None and run.epochs is None:
        yield "run.steps is missing: the number of training steps (or run.epochs: passes over the data)"
    if run.steps is not None and run.epochs is not None:
        yield f"run.steps={run.steps} and run.epochs={run.epochs:g} are both set; set one of them to null"


def check_printed_answers(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line if answers are to be printed but no samples are kept."""
    every = config.tracker.print_answers
    if every and config.tracker.samples == 0:
        yield f"tracker.print_answers={every}: prints one of tracker.samples=0 rows; set tracker.samples=1"


def check_dry_run(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line if the stage has no dry run."""
    if config.run.dry_run and STAGES[config.stage].dry_run is None:
        yield f"run.dry_run=true: stage={config.stage} has no dry run; set it to false"


def check_run_directory(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each problem of run.name, run.dir and the checkpoint to start from."""
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
    yield from unknown_names(config)
    yield from unusable_start(config)
