"""Checks whether other users could change the files of a run directory, or redirect what a run writes.

The directories to which runs and exports write are checked, with their direct entries. Deeper entries are
not, since each direct entry is replaced as a whole. ``run.dir`` itself may be a link. The entries of wandb's
directory are not checked, since wandb creates links there.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from ppo_ds.errors import UserError

DRY_RUN_MARKER = ".dry_run"  # file that marks a folder that a dry run created and may empty
# subdirectories of a run directory
_WRITTEN = ("checkpoints", "samples", "dumps", "exports", "step_models", "profile")


def dry_run_directory(run_dir: str) -> Path:
    """Returns the folder that a dry run writes to; ``run_dir`` itself is not touched."""
    return Path(f"{run_dir.rstrip('/')}_dry")


def check_run_directory(run_dir: Path) -> list[str]:
    """Checks who may change a run directory, which need not exist; returns warnings.

    Raises UserError if another user could make the run write elsewhere: if there are links where runs write,
    if every user may write, or if the owner is neither this user nor root. For root, any owner is accepted.
    """
    try:
        for problem in find_problems(run_dir):
            raise UserError(f"run.dir={run_dir}: {problem}, or choose another run.dir")
        return [f"warning    run.dir={run_dir}: {line}" for line in _cautions(run_dir)]
    except OSError as error:
        raise UserError(
            f"run.dir={run_dir}: cannot be read: {error.strerror}; choose another run.dir"
        ) from error


def find_problems(run_dir: Path) -> Iterator[str]:
    """Yields a line for each reason why the directory is unsafe, with a remedy."""
    for folder in (run_dir, *(run_dir / name for name in _WRITTEN)):
        if not folder.is_dir() or (folder.is_symlink() and folder != run_dir):
            continue  # such a link is reported as an entry of run_dir
        name = "" if folder == run_dir else f"{folder.name} "
        found = folder.stat()
        reachable = folder == run_dir or run_dir.stat().st_mode & stat.S_IXOTH
        if os.geteuid() != 0 and found.st_uid not in (os.geteuid(), 0):
            yield f"{name}belongs to {_user(found.st_uid)}, who could change it; copy its files"
        if found.st_mode & stat.S_IWOTH and reachable:
            yield (
                f"{name}may be written by every user (mode {stat.S_IMODE(found.st_mode):04o}); "
                f"check its files and run chmod o-w {folder}"
            )
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_symlink():
                yield (
                    f"{Path(entry.path).relative_to(run_dir)} is a symbolic link, and the run would write to "
                    "its target; replace it by a file or directory"
                )


def _cautions(run_dir: Path) -> Iterator[str]:
    if not run_dir.is_dir():
        return
    if run_dir.stat().st_mode & stat.S_IWGRP:
        yield f"its group may write to it, and could change the run's files; run chmod g-w {run_dir}"
    parent = run_dir.resolve().parent
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield f"every user may rename it, since {parent} is open to all; run chmod o-w {parent}"


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user with the id {uid}"
