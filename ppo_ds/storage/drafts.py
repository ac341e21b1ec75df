"""Writes files and directories so that even after a kill or a loss of power each is complete or absent.

Content is written to a draft beside the target, forced to the disk and renamed. A draft has a random name and
is created exclusively, so that an existing entry, such as a link, is never opened. ``remove_drafts`` deletes
the draft of a killed writer at the next launch. Modes follow the umask.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

_DRAFT = re.compile(r"\.tmp_.+_[0-9a-f]{16}")
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def write_file(path: Path, data: bytes | str) -> None:
    """Replaces a file atomically and forces it to the disk. Text is UTF-8, with ``?`` for lone surrogates."""
    with draft_file(path) as file:
        file.write(data.encode(errors="replace") if isinstance(data, str) else data)


@contextmanager
def draft_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a draft of ``path`` for writing. At the end of the block, the draft replaces ``path``.

    An exception deletes the draft and leaves ``path`` unchanged. A link is replaced, not followed.
    """
    draft = draft_path(path)
    try:
        with open(draft, "xb") as file:  # exclusively: follows no link
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def draft_directory(path: Path) -> Iterator[Path]:
    """Creates an empty draft of the directory ``path``. At the end of the block, the draft replaces ``path``.

    Missing parents are created. An exception deletes the draft and leaves ``path`` unchanged.
    """
    draft = draft_path(path)
    draft.mkdir(parents=True)
    try:
        yield draft
        for folder, _, files in os.walk(draft):
            for name in files:
                fsync(Path(folder, name))
            fsync(Path(folder))
        publish_directory(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def publish_directory(draft: Path, path: Path) -> None:
    """Renames a draft, already forced to the disk, to ``path``; deletes the directory that it replaces."""
    old = None
    if path.is_dir() and not path.is_symlink():
        old = path.rename(draft_path(path))
    draft.rename(path)
    fsync(path.parent)
    if old is not None:
        # ``old`` is named like a draft, so ``remove_drafts`` deletes the files that cannot be deleted now
        shutil.rmtree(old, ignore_errors=True)


def draft_path(path: Path) -> Path:
    """Returns an unused path beside ``path`` that cannot be guessed; ``remove_drafts`` recognizes it."""
    return path.with_name(f".tmp_{path.name}_{secrets.token_hex(8)}")


def remove_drafts(directory: Path, *, name: str | None = None, older_than: float = 0.0) -> None:
    """Deletes the drafts that killed writers left in ``directory``; with ``name``, only drafts of that entry.

    Drafts younger than ``older_than`` seconds are kept, since other processes may still be writing them.
    """
    if not directory.is_dir():
        return
    for entry in list(os.scandir(directory)):
        draft = _DRAFT.fullmatch(entry.name) and (name is None or entry.name[5:-17] == name)
        if draft and time.time() - entry.stat(follow_symlinks=False).st_mtime >= older_than:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def open_for_appending(path: Path) -> TextIO:
    """Opens a text file at its end; raises OSError if ``path`` is a link or no regular file."""
    descriptor = os.open(path, _APPEND | os.O_NONBLOCK, 0o666)  # does not block on a pipe without a reader
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="replace")


def fsync(path: Path) -> None:
    """Forces a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
