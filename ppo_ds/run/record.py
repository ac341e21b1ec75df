"""Keeps the files of an earlier run (its record) in a run directory, or moves them before a new run.

The record is moved to a folder earlier_1, earlier_2, ... The folder's name ends in ``.unfinished`` until the
move is complete; ``finish_move`` completes a move that a kill interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import yaml

from ppo_ds.config.resume import Settings, changes, in_words
from ppo_ds.errors import UserError
from ppo_ds.storage.drafts import fsync, remove_drafts, write_file
from ppo_ds.storage.reading import MAX_LINES_BYTES, read_json, read_text, read_yaml
from ppo_ds.storage.run_directory import check_run_directory

# Files and folders that belong to the steps run so far.
RECORD = tuple(
    """
    config.yaml memory.json metrics.jsonl events.jsonl samples eval_reference.json summary.json curves.png
    report.html model model_ema adapter critic step_models profile wandb.id tensorboard trackio.id
    """.split()
)
# All files and folders that run.resume=restart moves.
WHOLE_RECORD = (*RECORD, "checkpoints", "dumps", "exports", "wandb")
UNFINISHED = ".unfinished"
# Exit reasons of a run that is complete.
FINISHED = ("done", "early_stop")


def begins_anew(run_dir: Path, now: Settings) -> bool:
    """Returns whether run.resume=restart begins a new run instead of continuing the one in ``run_dir``.

    An unfinished run that was also started with run.resume=restart and has the same settings is continued.
    Otherwise a job that a scheduler stops and starts again would never finish.
    """
    before = recorded_settings(run_dir)
    if before is None or before["run"].get("resume") != "restart" or changes(before, now):
        return True
    try:
        return read_json(run_dir / "summary.json")["exit_reason"] in FINISHED
    except (OSError, ValueError, TypeError, LookupError):  # no readable summary: the run was killed
        return False


def recorded_settings(run_dir: Path) -> Settings | None:
    """Returns the settings of the last run in ``run_dir``, or None if it has no valid config.yaml."""
    try:
        found = read_yaml(run_dir / "config.yaml")
        return found if isinstance(found["run"], dict) else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def names_to_move(run_dir: Path, now: Settings, start: Path | None, restart: bool = False) -> list[str]:
    """Returns the names of the files in ``run_dir`` that an earlier run left and that must be moved away.

    Returns [] if no step was recorded, if ``start`` is a checkpoint of the earlier run, or if ``start`` is
    None (no checkpoint) and the settings are the same. With ``restart``, returns all of the earlier run's
    files, or [] if it has neither a step nor a checkpoint.
    """
    before, steps = recorded_settings(run_dir), recorded_steps(run_dir)
    checkpoints = run_dir / "checkpoints"
    if restart:
        used = steps or any(checkpoints.glob("step_*"))
        names = [*WHOLE_RECORD, *outdated_preparation(before, now)] if used else []
    elif not steps or (start is not None and start.parent.resolve() == checkpoints.resolve()):
        names = []
    elif start is None and before is not None and not changes(before, now):
        names = []
    else:  # the checkpoints are moved too, since the new run would otherwise delete them like its own
        names = [*RECORD, "checkpoints"]
    return [name for name in names if (run_dir / name).exists()]


def recorded_steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return read_text(metrics, limit=MAX_LINES_BYTES).count("\n") if metrics.exists() else 0


def outdated_preparation(before: Settings | None, now: Settings) -> list[str]:
    """Returns [the folder that `prepare` wrote to the run directory] if its arguments changed, else []."""
    made = ((before or {}).get("prepare") or {}).get("dir")
    if before is None or not isinstance(made, str):
        return []
    home = f"{before['run'].get('dir')}/"
    changed = any(key.startswith("prepare.") for key, _, _ in changes(before, now))
    return [made.removeprefix(home).split("/")[0]] if changed and made.startswith(home) else []


def open_run_directory(run_dir: Path, now: Settings, start: Path | None, restart: bool = False) -> list[str]:
    """Creates a run directory, writes config.yaml to it and returns lines for the start-up banner.

    A new directory is accessible only to its owner. First, the files of an earlier run that ``names_to_move``
    lists are moved to a folder earlier_N. May raise UserError (see ``check_run_directory``).
    """
    with writing(run_dir):
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = check_run_directory(run_dir)
        steps, before = recorded_steps(run_dir), recorded_settings(run_dir)
        if names := names_to_move(run_dir, now, start, restart):
            kept = next(path for i in count(1) if not (path := run_dir / f"earlier_{i}").exists())
            _move(run_dir, names, kept)
            changed = changes(before, now) if before else []
            lines.append(
                f"restart    {run_dir} had {steps} steps that this run does not continue; their files are "
                f"now in {kept}{f'; changed settings: {in_words(changed)}' if changed else ''}"
            )
        elif start is None and steps:
            lines.append(f"restart    {run_dir} had {steps} steps and no checkpoint; they are run again")
        for folder in ("", "samples", "dumps", "step_models", "profile"):
            remove_drafts(run_dir / folder)
        write_settings(run_dir, now)
    return lines


def write_settings(run_dir: Path, settings: Settings) -> None:
    write_file(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Converts an OSError inside the block into a UserError with the run directory."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"run.dir={run_dir}: cannot be written: {error.strerror}; choose another run.dir"
        ) from error


def finish_move(run_dir: Path) -> list[str]:
    """Completes a move that was interrupted by a kill; returns lines for the start-up banner."""
    lines = []
    for unfinished in run_dir.glob(f"earlier_*{UNFINISHED}"):
        kept = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
        with writing(run_dir):
            _move(run_dir, [name for name in WHOLE_RECORD if (run_dir / name).exists()], kept)
        lines.append(f"restart    the move of an earlier run to {kept}, which was interrupted, is complete")
    return lines


def _move(run_dir: Path, names: list[str], kept: Path) -> None:
    unfinished = kept.with_name(kept.name + UNFINISHED)
    unfinished.mkdir(mode=0o700, exist_ok=True)
    fsync(run_dir)  # the new folder must be on the disk before anything is moved to it
    for name in names:
        (run_dir / name).rename(unfinished / name)
    fsync(unfinished)
    unfinished.rename(kept)
    fsync(run_dir)
