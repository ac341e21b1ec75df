"""Fingerprints of data sets, with which a resumed run detects changed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the rows that a run has read from a data set."""

    key: str  # the config key of the path
    path: str
    rows: int
    digest: str  # hash of all rows in order, independent of the file's location

    def saved(self) -> dict[str, Any]:
        """Returns the entry that a checkpoint stores for the data set under ``key``."""
        return {"rows": self.rows, "digest": self.digest}


def changed_rows(before: Mapping[str, Any], now: Sequence[Fingerprint], checkpoint: object) -> Iterator[str]:
    """Yields a warning for each data set whose rows are not those of the checkpoint.

    A change is no error, since a curriculum may append or replace rows before a run is resumed. ``before``
    maps the keys of data sets to their entries in the checkpoint; checkpoints of earlier versions have none.
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
