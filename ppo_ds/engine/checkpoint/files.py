"""Durable file writes, and functions that raise an error on all ranks if a write fails on any rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ppo_ds.config.text import show
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.errors import RunError, UserError
from ppo_ds.storage.drafts import fsync, write_file
from ppo_ds.storage.reading import open_file

T = TypeVar("T")


class CheckpointError(RunError):
    """Raised on all ranks if a checkpoint could not be written or read (disk full, no permission)."""


def raise_on_all_ranks(world: World, error: Exception | None) -> None:
    """Raises CheckpointError on every rank if any rank has an error. All ranks must call this.

    If only one rank raised an error, the other ranks would wait for it in their next collective.
    """
    messages = world.gather_objects(None if error is None else str(error))
    found = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if found:
        raise CheckpointError("; ".join(found)) from error


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Runs ``work`` on each rank and returns this rank's result when all ranks have finished.

    All ranks must call this. An OSError on any rank becomes a CheckpointError on all ranks.
    """
    error = None
    try:
        result = work()
    except OSError as caught:
        error = caught
    raise_on_all_ranks(world, error)
    return result


def on_main_rank(world: World, work: Callable[[], object]) -> None:
    """Runs ``work`` on rank 0 only; otherwise like ``on_all_ranks``. All ranks must call this."""
    on_all_ranks(world, lambda: work() if world.is_main else None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file into a draft directory and forces it to the disk."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        fault("checkpoint.write")
    except SafetensorError as error:  # raised by safetensors if the disk is full
        raise OSError(f"{path}: {error}") from error
    fsync(path)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file, with each tensor replaced by its type, and forces it to the disk."""
    write_file(path, json.dumps(content, indent=1, default=lambda tensor: tensor.type()))


def is_inside(name: Any) -> bool:
    """Returns whether a file name from untrusted JSON is relative and stays inside its directory."""
    if not isinstance(name, str) or "\0" in name:
        return False
    return not PurePath(name).is_absolute() and ".." not in PurePath(name).parts


def check_inside(names: Iterable[Any], source: Path) -> None:
    """Raises UserError if one of ``names``, which the file ``source`` lists, is outside its directory."""
    for name in names:
        if not is_inside(name):
            raise UserError(
                f"{source}: names {show(name)}, which is no file of that folder; use another checkpoint"
            )


def sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
