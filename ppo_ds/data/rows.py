"""Raw rows of a data set, each with the place to name when something is wrong with it.

Local files are read here and not through `datasets`: a bad line is named as ``file:line``, rows keep exactly the values they had (no
columns are made up for rows that lack them), and nothing is written to a cache where several ranks could meet. Values of a CSV file are text.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TypeVar

import datasets
import pyarrow
import pyarrow.parquet

from ppo_ds.errors import UserError
from ppo_ds.types import Row

_SHOWN = 5  # different problems of rows reported at a time

T = TypeVar("T")


@dataclass(frozen=True)
class _Part:
    """Rows of one file. ``lines``: the line each row begins at; None where rows are not lines."""

    name: str
    rows: Sequence[Row]
    lines: Sequence[int] | None = None

    def head(self, n: int | None) -> _Part:
        if n is None or n >= len(self.rows):
            return self
        rows = self.rows.select(range(n)) if isinstance(self.rows, datasets.Dataset) else self.rows[:n]
        return _Part(self.name, rows, self.lines)

    def place(self, i: int) -> str:
        return f"{self.name} row {i + 1}" if self.lines is None else f"{self.name}:{self.lines[i]}"


class Rows(Sequence[Row]):
    """Rows of one or more files in order."""

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self._ends = list(accumulate(len(part.rows) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part.rows

    def _at(self, i: int) -> tuple[_Part, int]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        p = bisect_right(self._ends, i)
        return self._parts[p], i - (self._ends[p - 1] if p else 0)

    def __getitem__(self, i: int) -> Row:
        part, j = self._at(i)
        return part.rows[j]

    def place(self, i: int) -> str:
        """``file:line`` of a text file, ``file row n`` (from 1) of any other."""
        part, j = self._at(i)
        return part.place(j)


def load_rows(
    path: str,
    *,
    split: str = "train",
    revision: str | None = None,
    max_rows: int | None = None,
    key: str = "data.path",
) -> Rows:
    """The first ``max_rows`` rows of a local file, of all data files of a local folder in the order of their names, or of a Hub data set.

    ``split`` and ``revision`` are for the Hub only. ``key`` is the config key that errors name.
    """
    files = _local_files(path, key)
    if files is None:
        parts = [_from_hub(path, split, revision, key).head(max_rows)]
    else:
        parts = []
        for file in files:
            left = None if max_rows is None else max_rows - sum(len(part.rows) for part in parts)
            if left != 0:
                parts.append(_from_file(file, left, key).head(left))
    rows = Rows(parts)
    if not len(rows):
        raise UserError(f"{key}={path}: the data set is empty")
    return rows


def read_rows(rows: Rows, read: Callable[[Row], T], which: Iterable[int] | None = None) -> list[T]:
    """What ``read`` makes of the rows ``which`` (None: of all), or all that is wrong with them; its errors need not know the row's place."""
    made: list[T] = []
    places: dict[str, list[str]] = {}  # problem -> where; most often all rows have the same one
    for i, row in enumerate(rows) if which is None else ((i, rows[i]) for i in which):
        try:
            made.append(read(row))
        except UserError as error:
            places.setdefault(str(error), []).append(rows.place(i))
    if places:
        problems = [
            f"{at[0]}: {problem}" + (f" (and {len(at) - 1} more rows)" if len(at) > 1 else "")
            for problem, at in places.items()
        ]
        raise UserError(
            *problems[:_SHOWN],
            *([f"and {len(problems) - _SHOWN} more problems"] if len(problems) > _SHOWN else []),
        )
    return made


def _local_files(path: str, key: str) -> list[Path] | None:
    """The data files at a local path; None for what can only be a Hub name."""
    try:
        return _data_files(Path(os.path.expanduser(path)), path, key)
    except OSError as error:  # a folder that may not be read, a name that is too long
        raise UserError(f"{key}={path}: {error.strerror or _one_line(error)}") from error


def _data_files(local: Path, path: str, key: str) -> list[Path] | None:
    kinds = ", ".join(_READERS)
    if local.is_dir():
        files = sorted(
            file for file in local.iterdir() if file.suffix in _READERS and not file.name.startswith(".")
        )
        if not files:
            raise UserError(f"{key}={path}: no {kinds} file in this folder")
        return files
    if local.exists():
        if local.suffix not in _READERS:
            raise UserError(
                f"{key}={path}: the name of a data file must end in one of {kinds}; unpack or convert it first"
            )
        return [local]
    if local.suffix in _READERS or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise UserError(f"{key}={path}: no such file or folder")
    return None


def _from_hub(path: str, split: str, revision: str | None, key: str) -> _Part:
    try:
        return _Part(f"{path}[{split}]", datasets.load_dataset(path, split=split, revision=revision))
    except (
        ValueError
    ) as error:  # an unknown split or a data set of several configurations: the message lists what there is
        raise UserError(
            f"{key}={path}, {key.replace('path', 'split')}={split}: {_one_line(error)}"
        ) from error
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{key}={path}: {_one_line(error)} (give a local file or folder, or a Hub name that can be reached)"
        ) from error


def _from_file(file: Path, n: int | None, key: str) -> _Part:
    try:
        return _READERS[file.suffix](file, n)
    except OSError as error:
        raise UserError(f"{key}={file}: {error.strerror or _one_line(error)}") from error


def _part(name: str, numbered: Iterable[tuple[int, Row]], n: int | None) -> _Part:
    rows: list[Row] = []
    lines = array("L")
    for line, row in islice(numbered, n):
        rows.append(row)
        lines.append(line)
    return _Part(name, rows, lines)


def _read_jsonl(file: Path, n: int | None) -> _Part:
    return _part(str(file), _json_lines(file), n)


def _json_lines(file: Path) -> Iterator[tuple[int, Row]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{file}:{number}: not a JSON object on one line: {_one_line(error)}"
                ) from error
            yield number, _checked_row(row, f"{file}:{number}")


def _read_json(file: Path, n: int | None) -> _Part:
    """A list of rows; or, as in many ``.json`` files, one row a line."""
    text = _text(file)
    if not text.lstrip().startswith("["):
        return _read_jsonl(file, n)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {_one_line(error)}") from error
    return _Part(str(file), [_checked_row(row, f"{file} row {i}") for i, row in enumerate(rows, start=1)])


def _read_csv(file: Path, n: int | None) -> _Part:
    return _part(str(file), _csv_lines(file), n)


def _csv_lines(file: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(sys.maxsize)  # the default refuses texts of more than 131,072 characters
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    line = 1
    try:
        columns = next((values for values in reader if values), [])
        if len(set(columns)) < len(columns):
            raise UserError(
                f"{file}:{reader.line_num}: two columns have the same name ({', '.join(columns)}); give each its own"
            )
        line = reader.line_num + 1
        for values in reader:
            if values:
                if len(values) != len(columns):
                    raise UserError(
                        f"{file}:{line}: {len(values)} values for {len(columns)} columns ({', '.join(columns)})"
                    )
                yield line, dict(zip(columns, values, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file}:{line}: not CSV: {error}") from error


def _read_parquet(file: Path, n: int | None) -> _Part:
    try:
        table = pyarrow.parquet.read_table(file)
        table.validate(full=True)  # texts that are not UTF-8 would fail where they are read, row by row
        return _Part(str(file), datasets.Dataset(table))
    except (
        pyarrow.ArrowException,
        ValueError,
        NotImplementedError,
    ) as error:  # ValueError: two columns of one name
        raise UserError(f"{file}: not a Parquet file that can be read: {_one_line(error)}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}


def _text(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}:{line}: not UTF-8: {error.reason}") from error


def _checked_row(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row must be a JSON object with named columns, not {type(row).__name__}")
    return row


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
