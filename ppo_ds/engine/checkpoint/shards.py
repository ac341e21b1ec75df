"""Shards of a checkpoint: safetensors files with whole fp32 parameters by name, listed in a JSON index.

A shard holds tensors ``<part>/<parameter>`` (weight/..., exp_avg/..., exp_avg_sq/...). The index maps each
parameter to its shard. The files depend neither on the ZeRO stage nor on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import check_inside, on_all_ranks, raise_on_all_ranks, write_tensors
from ppo_ds.engine.checkpoint.tensor_file import TensorFile
from ppo_ds.engine.master_weights import WEIGHT, MasterWeights
from ppo_ds.errors import UserError
from ppo_ds.storage.reading import read_checked

FORMAT = 1
INDEX_OF_MODEL, INDEX_OF_COPY = "model.json", "shadow.json"
SHARD_BYTES = 2 * 1024**3


def write_shards(
    masters: MasterWeights, directory: Path, world: World, parts: Sequence[str]
) -> tuple[dict[str, str], list[Path]]:
    """Writes ``parts`` of all trained parameters. All ranks must call this; each writes one shard at a time.

    Returns the file name of each parameter's shard, and the files that this rank has written. Raises
    CheckpointError on all ranks if a shard could not be written.
    """
    on_all_ranks(world, lambda: directory.mkdir(parents=True, exist_ok=True))
    shards: dict[str, int] = {}
    shard = filled = 0
    for name in masters.parameters:
        if filled >= SHARD_BYTES:
            shard, filled = shard + 1, 0
        shards[name] = shard
        filled += 4 * len(parts) * math.prod(masters.shape(name))  # fp32
    index = {name: f"shard-{shard:05d}.safetensors" for name, shard in shards.items()}
    written: list[Path] = []
    error = None  # raised at the end: if only this rank raised it now, the others would wait for this rank
    for _, names in groupby(shards, key=lambda name: shards[name] // world.size):
        tensors: dict[str, Tensor] = {}
        for name, part in product(names, parts):
            whole = masters.get(name, part)
            if shards[name] % world.size == world.rank:
                tensors[f"{part}/{name}"], file = whole.cpu(), directory / index[name]
        if tensors and error is None:
            try:
                write_tensors(file, tensors)
                written.append(file)
            except OSError as caught:
                error = caught
    raise_on_all_ranks(world, error)
    return index, written


class _Index(BaseModel):
    format: int
    shards: dict[str, Any]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # absent from the index of a weight copy


def read_index(file: Path, parameters: Collection[str], *, key: str = "") -> dict[str, Any]:
    """Reads the index of a model or weight copy and compares it with the trained ``parameters``.

    Raises UserError if format or parameters differ, or if a shard is outside the folder. The text of the
    error starts with ``key``.
    """
    directory = file.parent
    index = read_checked(file, _Index)
    if index["format"] != FORMAT:
        raise UserError(
            f"{key}{directory}: has format {index['format']}, this version reads {FORMAT}: "
            "use the version that wrote it"
        )
    check_inside(index["shards"].values(), file)
    missing = [name for name in parameters if name not in index["shards"]]
    unknown = [name for name in index["shards"] if name not in parameters]
    if missing or unknown:
        differences = [f"it lacks {name}" for name in missing[:3]]
        differences += [f"it has {name}, which the model lacks" for name in unknown[:3]]
        text = f"{'; '.join(differences)} ({len(missing) + len(unknown)} in all)"
        raise _other_model(f"{key}{directory}", text, missing + unknown)
    return index


def read_shards(
    directory: Path,
    shards: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
    ranges: Mapping[str, slice],
    parts: Sequence[str],
    *,
    key: str = "",
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (parameter, part, values) for ``parts`` of the parameters in ``shapes``, one tensor at a time.

    The values are the elements ``ranges[parameter]`` of the flattened tensor; nothing else is read.
    ``shards`` maps parameter names to file names. Raises UserError, on every rank that reads the directory,
    if a saved shape differs from ``shapes``; the message starts with ``key``.
    """
    names_of: dict[str, list[str]] = {}
    for name in shapes:
        names_of.setdefault(shards[name], []).append(name)
    for file_name, names in names_of.items():
        with closing(TensorFile(directory / file_name)) as file:
            for name in names:
                saved, shape = file.shape(f"{WEIGHT}/{name}"), list(shapes[name])
                if saved != shape:
                    difference = f"{name} is {saved} there and {shape} here"
                    raise _other_model(f"{key}{directory}", difference, [name])
                for part in parts:
                    yield name, part, file.read(f"{part}/{name}", ranges[name])


def _other_model(directory: str, difference: str, names: Collection[str]) -> UserError:
    adapters = ", with its lora.rank and lora.targets" if any(".lora_" in name for name in names) else ""
    return UserError(
        f"{directory}: was saved from another model: {difference}; "
        f"use the model that it was saved from{adapters}"
    )
