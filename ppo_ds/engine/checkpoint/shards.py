"""Shards of a checkpoint: safetensors files with whole fp32 parameters by name, listed in a JSON index.

A shard holds tensors ``<part>/<parameter>`` (weight/..., exp_avg/..., exp_avg_sq/...). The index maps each
parameter to its shard. The files depend neither on the ZeRO stage nor on the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import check_inside, on_all_ranks, raise_on_all_ranks, write_tensors
from ppo_ds.engine.checkpoint.tensor_file import TensorFile
from ppo_ds.engine.master_weights import WEIGHT, MasterWeights
from ppo_ds.errors import UserError

FORMAT = 1
INDEX_OF_MODEL, INDEX_OF_COPY = "model.json", "shadow.json"
SHARD_BYTES = 2 * 1024**3


class ShardWriter:
    """Assigns shards to the ranks in turn. The ranks write their shards in parallel."""

    def __init__(self, directory: Path, world: World, parts: Sequence[str]):
        self.index: dict[str, str] = {}  # parameter name -> file name, the same on every rank
        self.written: list[Path] = []  # files that this rank has written
        self._directory, self._world, self._parts = directory, world, parts
        self._shard, self._bytes = 0, 0
        self._tensors: dict[str, Tensor] = {}  # tensors of this rank's current shard
        # ``finish`` raises it on all ranks; if only this rank raised it, the others would wait for this rank
        self._error: OSError | None = None

    def add(self, name: str, masters: MasterWeights) -> None:
        """Adds one parameter. A collective."""
        if self._bytes >= SHARD_BYTES:
            self._shard, self._bytes = self._shard + 1, 0
            if self._shard % self._world.size == 0:
                self._flush()
        self.index[name] = f"shard-{self._shard:05d}.safetensors"
        for part in self._parts:
            whole = masters.get(name, part)
            self._bytes += whole.nbytes
            if self._shard % self._world.size == self._world.rank:
                self._tensors[f"{part}/{name}"] = whole.cpu()
                self._file = self._directory / self.index[name]

    def finish(self) -> None:
        """Writes the last shards. A collective.

        Raises CheckpointError on all ranks if a shard could not be written.
        """
        self._flush()
        raise_on_all_ranks(self._world, self._error)

    def _flush(self) -> None:
        if self._tensors and self._error is None:
            try:
                write_tensors(self._file, self._tensors)
                self.written.append(self._file)
            except OSError as error:
                self._error = error
        self._tensors = {}


def write_shards(masters: MasterWeights, directory: Path, world: World, parts: Sequence[str]) -> ShardWriter:
    """Writes ``parts`` of all trained parameters. A collective."""
    on_all_ranks(world, lambda: directory.mkdir(parents=True, exist_ok=True))
    writer = ShardWriter(directory, world, parts)
    for name in masters.parameters:
        writer.add(name, masters)
    writer.finish()
    return writer


def read_index(file: Path, parameters: Collection[str], *, key: str = "") -> dict[str, Any]:
    """Reads the index of a model or weight copy and compares it with the trained ``parameters``.

    Raises UserError if the format or the parameters differ, or if a shard is outside the directory of
    ``file``. The message starts with ``key``.
    """
    directory = file.parent
    index = json.loads(file.read_text(encoding="utf-8"))
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
