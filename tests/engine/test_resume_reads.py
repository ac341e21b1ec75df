"""Tests that a rank reads only its own part of a checkpoint, for many ranks in one process.

The partitions are those of DeepSpeed: of its ``link_hp_params`` for ZeRO 1 and 2, and equal shares of each
parameter for ZeRO-3. test_checkpoint.py compares them with those of real engines.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils.mixed_precision_linkage import link_hp_params
from torch import Tensor, nn

from ppo_ds.engine.checkpoint import shards
from ppo_ds.engine.checkpoint.shards import read_shards, write_shards
from ppo_ds.engine.checkpoint.tensor_file import TensorFile
from ppo_ds.engine.master_weights import PARTS, local_range
from tests.engine.recorded_reads import recorded_reads
from tests.engine.test_checkpoint import OneRank

SHAPES = {
    "embed": (199, 16),
    "scalar": (1,),
    "bias": (48,),
    "hidden": (48, 16),
    "tiny": (3,),  # fewer elements than the larger numbers of ranks
    "experts": (2, 40, 16),
    "zero_dim": (),
    "head": (151, 16),
}
SIZES = (1, 2, 3, 8)
ALIGNMENT = 4  # DeepSpeed pads flat partitions to a multiple


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A checkpoint of several files, and its tensors."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    tensors = {(name, part): torch.randn(shape) for name, shape in SHAPES.items() for part in PARTS}
    masters: Any = SimpleNamespace(
        parameters=SHAPES, shape=SHAPES.get, get=lambda name, part: tensors[name, part]
    )
    index, _ = write_shards(masters, tmp_path, OneRank(), PARTS)
    assert len(set(index.values())) > 2
    return SimpleNamespace(directory=tmp_path, index=index, tensors=tensors)


def values_of(saved: SimpleNamespace, ranges: dict[str, slice]) -> Iterator[tuple[str, str, Tensor]]:
    return read_shards(saved.directory, saved.index, SHAPES, ranges, PARTS)


def sharded(numel: int, size: int) -> Any:
    """Stands in for a parameter of ``numel`` elements that ZeRO-3 has partitioned."""
    return SimpleNamespace(ds_numel=numel, ds_tensor=torch.empty(math.ceil(numel / size)))


def assert_reads_only(saved: SimpleNamespace, ranges: list[dict[str, slice]]) -> None:
    """Reads every rank's ``ranges``; compares the values, and the bytes requested with the rank's share."""
    read = []
    found: dict[tuple[str, str], list[Tensor]] = {key: [] for key in saved.tensors}
    for own in ranges:
        with recorded_reads() as reads:
            for name, part, values in values_of(saved, own):
                assert values.dim() == 1
                found[name, part].append(values)
        share = sum(4 * len(PARTS) * (elements.stop - elements.start) for elements in own.values())
        assert reads.tensor_bytes == share
        assert reads.most_open_files == 1
        read.append(reads.tensor_bytes)
    for key, pieces in found.items():
        assert torch.equal(torch.cat(pieces), saved.tensors[key].flatten()), key
    assert sum(read) == sum(tensor.nbytes for tensor in saved.tensors.values())


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_of_zero_3_reads_its_share_of_each_tensor(saved: SimpleNamespace, size: int) -> None:
    parameters = {name: sharded(math.prod(shape), size) for name, shape in SHAPES.items()}
    ranges = [{name: local_range(p, 3, rank) for name, p in parameters.items()} for rank in range(size)]
    if size == 8:
        assert ranges[7]["tiny"] == slice(3, 3)  # nothing
    assert_reads_only(saved, ranges)


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_of_zero_1_and_2_reads_its_range_of_the_flat_weights(
    saved: SimpleNamespace, size: int
) -> None:
    total = sum(map(math.prod, SHAPES.values()))
    partition = math.ceil(total / (size * ALIGNMENT)) * ALIGNMENT
    flat = torch.cat([saved.tensors[name, "weight"].flatten() for name in SHAPES])
    flat = nn.functional.pad(flat, (0, partition * size - total))
    ranges = []
    for rank in range(size):
        parameters = {name: nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
        own = torch.zeros(partition)
        link_hp_params(
            list(parameters.values()), own, {}, {}, False, 0, partition * rank, partition, dp_group=None
        )
        ranges.append({name: local_range(p, 2, rank) for name, p in parameters.items()})
        for name, part, values in values_of(saved, ranges[-1]):
            if part == "weight" and values.numel():
                parameters[name]._hp_mapping.hp_fragment.copy_(values)
        assert torch.equal(own, flat[partition * rank : partition * (rank + 1)])
    assert_reads_only(saved, ranges)


def test_every_rank_reads_everything_without_zero(saved: SimpleNamespace) -> None:
    parameters = {name: nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
    assert_reads_only(saved, [{name: local_range(p, 0, 0) for name, p in parameters.items()}])


def test_the_operating_system_is_asked_for_these_bytes_only(
    saved: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, preadv, advise = [], os.preadv, os.posix_fadvise

    def recorded(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return preadv(descriptor, buffers, offset)

    advice: list[int] = []
    monkeypatch.setattr(os, "preadv", recorded)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: advice.append(a[3]) or advise(*a))
    path = saved.directory / saved.index["embed"]
    with closing(TensorFile(path)) as file:
        header = asked.copy()
        values = file.read("exp_avg/embed", slice(17, 40))
    assert header == [(0, 8), (8, header[1][1])] and advice == [os.POSIX_FADV_RANDOM]
    assert torch.equal(values, saved.tensors["embed", "exp_avg"].flatten()[17:40])
    ((offset, count),) = asked[2:]
    assert path.read_bytes()[offset : offset + count] == values.numpy().tobytes()


def test_partial_reads_of_the_operating_system_are_continued(
    saved: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda d, buffers, offset: preadv(d, [buffers[0][:1000]], offset))
    whole = {name: slice(0, math.prod(shape)) for name, shape in SHAPES.items()}
    for name, part, values in values_of(saved, whole):
        assert torch.equal(values, saved.tensors[name, part].flatten())


def damaged_files(path: Path) -> Iterator[tuple[bytes, str]]:
    """Yields damaged contents of the tensor file ``path``, and a part of the error's text."""
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    yield b"123", "too short"
    yield good[: 8 + length + 10], "too short"
    yield (2**40).to_bytes(8, "little") + good[8:], "header has 1099511627776 bytes"
    yield good[:8] + b"x" * length + good[8 + length :], "Expecting value"
    for entry, message in (
        ({"dtype": "I8"}, "no tensor weight/embed"),
        ({"shape": [-1]}, "for the shape"),
        ({"shape": "ab"}, "no tensor weight/embed"),
        ({"data_offsets": [0, 4]}, "has 4 bytes for the shape"),
        ({"data_offsets": [-4, 12732]}, "for the shape"),
    ):
        other = json.dumps(header | {"weight/embed": header["weight/embed"] | entry}).encode()
        yield len(other).to_bytes(8, "little") + other + good[8 + length :], message


def test_a_damaged_file_is_one_line(saved: SimpleNamespace) -> None:
    path = saved.directory / saved.index["embed"]
    for content, message in list(damaged_files(path)):
        path.write_bytes(content)
        with pytest.raises(OSError, match=message) as error, closing(TensorFile(path)) as file:
            file.read("weight/embed", slice(0, 199 * 16))
        assert str(path) in str(error.value) and "\n" not in str(error.value)
