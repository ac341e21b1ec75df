"""Files that survive a crash, written by several ranks that must agree whether all went well."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ppo_ds.config.typed import show
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.errors import RunError, UserError

T = TypeVar("T")


class CheckpointError(RunError):
    """A checkpoint could not be written or read (disk full, no permission): the same message on every rank."""


def agree(world: World, error: Exception | None) -> None:
    """Collective: what went wrong on any rank is raised on all of them, since one that goes on alone would wait for ever."""
    messages = world.gather_objects(None if error is None else str(error))
    found = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if found:
        raise CheckpointError("; ".join(found)) from error


def together(world: World, work: Callable[[], T]) -> T:
    """Collective: each rank does its own ``work``, and all have finished when it returns. OSErrors become everybody's CheckpointError."""
    error = None
    try:
        result = work()
    except OSError as caught:
        error = caught
    agree(world, error)
    return result


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, on the disk when this returns."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        fault("checkpoint.write")
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path}: {error}") from error
    sync(path)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    sync(path)


def write_pointer(path: Path, text: str) -> None:
    """A small text file that holds either the old or the new text, whenever the machine stops."""
    aside = path.with_name(f".tmp_{path.name}")
    aside.write_text(text + "\n", encoding="utf-8")
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def is_below(name: Any) -> bool:
    """Whether a file's name, read from JSON that may be somebody else's, stays below the folder it is said to be in."""
    return (
        isinstance(name, str)
        and "\0" not in name
        and not PurePath(name).is_absolute()
        and ".." not in PurePath(name).parts
    )


def expect_below(names: Iterable[Any], file: Path) -> None:
    """UserError unless all files that ``file`` names are below its folder."""
    for name in names:
        if not is_below(name):
            raise UserError(
                f"{file}: names {show(name)}, which is no file of that folder; use another checkpoint"
            )


def sync(path: Path) -> None:
    """fsync of a file, or of a folder: of the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
