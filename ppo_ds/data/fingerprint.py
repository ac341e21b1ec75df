"""Fingerprints of data sets, by which a resumed run notices that the rows of a file have changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the rows that a run has read of one data set."""

    key: str  # the config key of the path
    path: str
    rows: int
    digest: str  # of the contents of all rows in their order, wherever the file lies

    def saved(self) -> dict[str, Any]:
        """Returns the part that a checkpoint saves, under the key."""
        return {"rows": self.rows, "digest": self.digest}


def changed_rows(before: Mapping[str, Any], now: Sequence[Fingerprint], checkpoint: object) -> Iterator[str]:
    """Yields a warning for each data set whose rows are not those of the checkpoint.

    This is no error, since a curriculum may append or replace rows between two starts. ``before`` holds what
    the checkpoint has saved of each data set by its key; checkpoints of earlier versions have saved nothing.
    """
    for data in now:
        saved = before.get(data.key)
        if saved is None or saved == data.saved():
            continue
        yield (
            f"{data.key}={data.path}: its rows have changed since {checkpoint} ({saved['rows']} rows then, "
            f"{data.rows} now); scores before and after cannot be compared, and with another number of rows "
            "the current pass repeats some and leaves out others"
        )
