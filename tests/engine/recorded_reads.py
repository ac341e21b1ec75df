"""Records what is read from the tensor files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ppo_ds.engine.checkpoint import shards
from ppo_ds.engine.checkpoint.tensor_file import TensorFile


class Reads:
    """The reads of one rank."""

    def __init__(self) -> None:
        self.tensor_bytes = 0  # of tensors
        self.header_bytes = 0
        self.most_open_files = 0


@contextmanager
def recorded_reads() -> Iterator[Reads]:
    """Counts the bytes that are read from shards inside the block, at the call of the operating system."""
    reads, open_files = Reads(), set()

    class Recorded(TensorFile):
        def __init__(self, path: Path) -> None:
            self._in_tensor = False
            open_files.add(self)
            reads.most_open_files = max(reads.most_open_files, len(open_files))
            super().__init__(path)

        def close(self) -> None:
            open_files.discard(self)
            super().close()

        def read(self, name: str, elements: slice) -> Tensor:
            self._in_tensor = True
            try:
                return super().read(name, elements)
            finally:
                self._in_tensor = False

        def _read(self, count: int, offset: int) -> Any:
            if self._in_tensor:
                reads.tensor_bytes += count
            else:
                reads.header_bytes += count
            return super()._read(count, offset)

    shards.TensorFile = Recorded
    try:
        yield reads
    finally:
        shards.TensorFile = TensorFile
