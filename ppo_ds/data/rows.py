"""Raw rows of a data set, with a location for each row in error messages.

Local files are read here and not by ``datasets``, so that a bad line is reported as ``file:line``, rows keep
exactly their values, and nothing is written to a cache. All values of a CSV file are text.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import datasets
import pyarrow
import pyarrow.parquet

from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.data.reasoning_gym import TaskRows
from ppo_ds.data.sharing import on_all, refuse_different
from ppo_ds.errors import UserError
from ppo_ds.storage.reading import memory_limit
from ppo_ds.types import Row

if TYPE_CHECKING:
    from ppo_ds.distributed.world import World

_MAX_PROBLEMS = 5  # distinct problems in one error

# Memory limits in bytes for the rows of a Parquet file, since a few KB can expand to terabytes
_MAX_BYTES = 2**33  # all rows
_MAX_ROW_BYTES = 2**26  # one row, on average over a batch
_BATCH_BYTES = 2**26  # the rows that are decoded together
# address space of the decoder; it reserves more memory than it uses, some of it for the thread of each core
_DECODER_BYTES = 2**32 + 2**28 * (os.cpu_count() or 1)

# A file of a Hub data set, in the notation of huggingface_hub: hf://datasets/OWNER/NAME/FILE
_HUB_FILE = re.compile(r"hf://datasets/([^/@]+/[^/@]+)/([^@]+)")

T = TypeVar("T")


@dataclass(frozen=True)
class _Part:
    """The rows of one local file, of one split of a data set, or of one task."""

    name: str
    rows: Sequence[Row]
    lines: Sequence[int] | None = None  # the line at which each row begins; None: errors name row numbers

    def head(self, n: int | None) -> _Part:
        if n is None or n >= len(self.rows):
            return self
        rows = self.rows.select(range(n)) if isinstance(self.rows, datasets.Dataset) else self.rows[:n]
        return _Part(self.name, rows, self.lines)

    def location(self, i: int) -> str:
        return f"{self.name} row {i + 1}" if self.lines is None else f"{self.name}:{self.lines[i]}"


class Rows:
    """The rows of one or more files in order."""

    def __init__(self, parts: list[_Part]):
        self._parts = parts
        self._ends = list(accumulate(len(part.rows) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part.rows

    def _locate(self, i: int) -> tuple[_Part, int]:
        if not 0 <= i < len(self):
            raise IndexError(i)
        p = bisect_right(self._ends, i)
        return self._parts[p], i - (self._ends[p - 1] if p else 0)

    def __getitem__(self, i: int) -> Row:
        part, j = self._locate(i)
        return part.rows[j]

    def location(self, i: int) -> str:
        """Returns ``file:line`` for a text file and ``file row n`` (from 1) for other files."""
        part, j = self._locate(i)
        return part.location(j)

    @contextmanager
    def named_in_errors(self, i: int) -> Iterator[None]:
        """Adds the location of a row to a UserError raised inside the block."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.location(i)}: {error}") from error


def load_rows(
    path: str,
    *,
    split: str = "train",
    revision: str | None = None,
    max_rows: int | None = None,
    key: str = "data.path",
    task: TaskRows | None = None,
    world: World | None = None,
) -> Rows:
    """Loads the first ``max_rows`` rows of a data set. All ranks of ``world`` must call this.

    ``path`` is a local file, a local folder (all its data files, sorted by name), a Hub data set, for which
    ``split`` and ``revision`` apply, or a file of a Hub data set, hf://datasets/OWNER/NAME/FILE. ``key`` is
    the config key for error messages. On each node, the first rank downloads a Hub data set. Rank 0 makes the
    rows of a ``task``.
    """
    if task is not None:
        made = on_all(world, lambda: task.make() if world is None or world.is_main else [])
        shared = made if world is None or world.size == 1 else world.gather_objects(made)[0]
        return Rows([_Part(path, shared)])
    files = on_all(world, lambda: _data_files(path, key))
    refuse_different(world, files is None, f"{key}={path}")
    if files is None:
        name = path if path.startswith("hf://") else f"{path}[{split}]"
        table = _load_on_nodes(world, lambda: _load_from_hub(path, split, revision, key))
        parts = [_Part(name, datasets.Dataset(datasets.table.InMemoryTable(table))).head(max_rows)]
    else:
        parts = on_all(world, lambda: _read_files(files, max_rows, key))
    rows = Rows(parts)
    if not len(rows):
        raise UserError(f"{key}={path}: the data set is empty")
    return rows


def _read_files(files: list[Path], max_rows: int | None, key: str) -> list[_Part]:
    """Reads the first ``max_rows`` rows of the files."""
    parts: list[_Part] = []
    for file in files:
        left = None if max_rows is None else max_rows - sum(len(part.rows) for part in parts)
        if left == 0:
            break
        try:
            if not file.is_file():  # a pipe or a device might never end
                raise UserError(f"{key}={file}: is not a regular file, or a link to nothing")
            parts.append(_READERS[file.suffix](file, left).head(left))
        except OSError as error:
            raise UserError(f"{key}={file}: {error.strerror or _one_line(error)}") from error
    return parts


def map_rows(rows: Rows, function: Callable[[Row], T], indices: Iterable[int] | None = None) -> list[T]:
    """Applies ``function`` to the rows at ``indices`` (None: all) and returns the results.

    If ``function`` raises UserErrors, raises one with the first _MAX_PROBLEMS different problems and the
    number of others. A problem has the location of the first row with it, and the number of further rows.
    """
    results: list[T] = []
    locations: dict[str, list[str]] = {}  # by problem, because often all rows have the same problem
    for i, row in enumerate(rows) if indices is None else ((i, rows[i]) for i in indices):
        try:
            results.append(function(row))
        except UserError as error:
            locations.setdefault(str(error), []).append(rows.location(i))
    if not locations:
        return results
    problems = []
    for problem, at in locations.items():
        more = f" (and {len(at) - 1} more rows)" if len(at) > 1 else ""
        problems.append(f"{at[0]}: {problem}{more}")
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"and {len(problems) - _MAX_PROBLEMS} more problems"]
    raise UserError(*problems)


def parse_rows(
    world: World | None, rows: Rows, parse: Callable[[Row], T], key: str, path: str
) -> tuple[list[T], Fingerprint]:
    """Parses all rows on every rank and returns the results and the fingerprint of the rows.

    All ranks must call this. All raise UserError if parsing fails on any rank, or if the ranks' rows differ.
    """
    digest = hashlib.blake2b(digest_size=16)

    def parse_one(row: Row) -> T:
        digest.update(repr(row).encode(errors="surrogatepass"))
        return parse(row)

    parsed = on_all(world, lambda: map_rows(rows, parse_one))
    refuse_different(world, digest.hexdigest(), f"{key}={path}")
    return parsed, Fingerprint(key, path, len(rows), digest.hexdigest())


def existing_file(path: str, revision: str | None, world: World | None) -> str:
    """Resolves hf://datasets/OWNER/NAME/FILE|FILE to the first existing file, or else to the last file.

    All ranks must call this.
    """
    folder, _, names = path.rpartition("/")
    *first, last = names.split("|") if path.startswith("hf://datasets/") else [names]

    def find() -> str:
        for name in first:
            with suppress(OSError):  # if the Hub is unreachable, loading the last file reports this
                datasets.load_dataset_builder(folder[14:], revision=revision, data_files=name)
                return f"{folder}/{name}"
        return f"{folder}/{last}"

    return on_all(world, find) if first else path


def _data_files(path: str, key: str) -> list[Path] | None:
    """Returns the data files of a local path, or None for a path that can only be a Hub name."""
    local, kinds = Path(os.path.expanduser(path)), ", ".join(_READERS)
    if path.startswith("hf://"):
        if not _HUB_FILE.fullmatch(path):
            raise UserError(
                f"{key}={path}: a file of a Hub data set has the form hf://datasets/OWNER/NAME/FILE"
            )
        return None
    try:
        if local.is_dir():
            files = [each for each in local.iterdir() if each.suffix in _READERS and each.name[0] != "."]
            if not files:
                raise UserError(f"{key}={path}: no {kinds} file in this folder")
            return sorted(files)
        exists = local.exists()
    except OSError as error:  # such as an unreadable folder or a name that is too long
        raise UserError(f"{key}={path}: {error.strerror or _one_line(error)}") from error
    if exists and local.suffix not in _READERS:
        raise UserError(
            f"{key}={path}: the name of a data file must end in one of {kinds}; unpack or convert it first"
        )
    if not exists and (
        local.suffix in _READERS or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    ):
        raise UserError(f"{key}={path}: no such file or folder")
    return [local] if exists else None


def _load_on_nodes(world: World | None, load: Callable[[], datasets.Dataset]) -> pyarrow.Table:
    """Returns the table that ``load`` returns, without its metadata, which may declare images or sounds.

    All ranks must call this. ``load`` sends several requests to the Hub. Therefore only the first rank of
    each node calls it, and the others read the Arrow files in the cache of ``datasets``. If the split is only
    a part of the files, as in train[:10%], all ranks call ``load``.
    """
    if world is None or world.size == 1:
        return load().data.table.replace_schema_metadata(None)
    dataset = world.on_all(load if world.is_first_on_node else lambda: None)
    names = world.gather_objects(None if dataset is None else _whole_files(dataset))
    if all(names[rank] for rank in range(world.size) if names[rank] is not None):
        files = names[world.rank - world.local_rank] or ()
        table = pyarrow.concat_tables(_memory_mapped(name) for name in files)
    else:
        table = world.on_all(lambda: load() if dataset is None else dataset).data.table
    return table.replace_schema_metadata(None)


def _whole_files(dataset: datasets.Dataset) -> list[str]:
    """Returns the Arrow files of a data set, or [] if the data set is only a part of its files."""
    names = [file["filename"] for file in dataset.cache_files]
    return names if sum(_memory_mapped(name).num_rows for name in names) == len(dataset) else []


def _memory_mapped(name: str) -> pyarrow.Table:
    return datasets.table.MemoryMappedTable.from_file(name).table


def _load_from_hub(path: str, split: str, revision: str | None, key: str) -> datasets.Dataset:
    """Loads a split or a file of a Hub data set. Raises UserError if its files are not all on the Hub."""
    file = _HUB_FILE.fullmatch(path)
    name, options = (file[1], {"data_files": file[2]}) if file else (path, {})
    try:
        listed = datasets.load_dataset_builder(name, revision=revision, **options).config.data_files or {}
        for source in (str(source) for sources in listed.values() for source in sources):
            if not source.startswith("hf://datasets/"):
                raise UserError(
                    f"{key}={path}: the data set names a file outside of the Hub, {source}; "
                    "use another data set"
                )
        return datasets.load_dataset(name, split="train" if file else split, revision=revision, **options)
    except UserError:
        raise
    except ValueError as error:
        # an unknown split, or a data set with several configurations: the message lists the valid names
        raise UserError(
            f"{key}={path}, {key.replace('path', 'split')}={split}: {_one_line(error)}"
        ) from error
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{key}={path}: {_one_line(error)} (give a local file or folder, or the name of a reachable Hub "
            "data set)"
        ) from error


def _read_lines(
    numbered_rows: Callable[[Path], Iterator[tuple[int, Row]]], file: Path, n: int | None
) -> _Part:
    """Reads the first ``n`` rows of a text file with their line numbers."""
    rows: list[Row] = []
    lines = array("L")
    for line, row in islice(numbered_rows(file), n):
        rows.append(row)
        lines.append(line)
    return _Part(str(file), rows, lines)


def _jsonl_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yields each row with its line number."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                at = (
                    f"{error.msg} at character {error.pos + 1}"
                    if isinstance(error, json.JSONDecodeError)
                    else error
                )
                raise UserError(f"{file}:{number}: not a JSON object on one line: {_one_line(at)}") from error
            yield number, _check_row(row, f"{file}:{number}")


def _read_json(file: Path, n: int | None) -> _Part:
    """Reads a JSON list of rows, or one row per line, which is also common in ``.json`` files."""
    text = _text(file)
    if not text.lstrip().startswith("["):
        return _read_lines(_jsonl_rows, file, n)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON: {_one_line(error)}") from error
    return _Part(str(file), [_check_row(row, f"{file} row {i}") for i, row in enumerate(rows, start=1)])


def _csv_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yields each row with the number of its first line. The file's first row contains the column names."""
    csv.field_size_limit(sys.maxsize)  # the default refuses fields of more than 131,072 characters
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    line = 1
    try:
        columns = next((values for values in reader if values), [])
        if len(set(columns)) < len(columns):
            raise UserError(
                f"{file}:{reader.line_num}: two columns have the same name ({', '.join(columns)}); give "
                "each its own"
            )
        line = reader.line_num + 1
        for values in reader:
            if values:
                if len(values) != len(columns):
                    raise UserError(
                        f"{file}:{line}: {len(values)} values for {len(columns)} columns "
                        f"({', '.join(columns)})"
                    )
                yield line, dict(zip(columns, values, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file}:{line}: not CSV: {error}") from error


def _read_parquet(file: Path, n: int | None) -> _Part:
    """Reads the first ``n`` rows, batch by batch and within the memory limits.

    Drops the file's metadata, which can declare columns as images or sounds. ``datasets`` would decode these,
    and download them if a row contains a URL.
    """
    limit = _DECODER_BYTES + min(_MAX_BYTES, _MAX_ROW_BYTES * (n or _MAX_BYTES))
    try:
        with memory_limit(limit), pyarrow.parquet.ParquetFile(file) as parquet:
            for field in parquet.schema_arrow:
                _refuse_extension(field.type, f"{file}: column {field.name}")
            batches = list(_parquet_batches(parquet, n, file))
            table = pyarrow.Table.from_batches(batches, parquet.schema_arrow).replace_schema_metadata(None)
        table.validate(full=True)  # otherwise invalid UTF-8 fails later, when the row is read
        return _Part(str(file), datasets.Dataset(table))
    except (pyarrow.ArrowException, ValueError, NotImplementedError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        # ValueError: two columns with the same name
        raise UserError(f"{file}: cannot be read as Parquet: {_one_line(error)}") from error


def _parquet_batches(
    parquet: pyarrow.parquet.ParquetFile, n: int | None, file: Path
) -> Iterator[pyarrow.RecordBatch]:
    """Yields batches with at least the first ``n`` rows; raises UserError if they exceed the memory limits.

    A value can be as large as the column's decoded pages, and each row may repeat it, so the larger the
    columns are, the fewer rows are decoded together.
    """
    groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    largest = max((column.total_uncompressed_size for column in columns), default=1)
    batch_size = min(1024, max(1, _BATCH_BYTES // max(1, largest)))
    rows = size = 0
    for batch in parquet.iter_batches(batch_size=batch_size if n is None else min(n, batch_size)):
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if batch.nbytes > _MAX_ROW_BYTES * batch.num_rows:
            raise UserError(f"{file}: row {rows} or one before it takes more than {_MAX_ROW_BYTES >> 20} MB")
        if size > _MAX_BYTES:
            raise UserError(
                f"{file}: its rows take more than {_MAX_BYTES >> 20} MB; set max_rows or split it"
            )
        yield batch
        if n is not None and rows >= n:
            return


def _refuse_extension(kind: pyarrow.DataType, location: str) -> None:
    """Raises UserError if a type or a nested type is an extension type, which runs code of its library."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        raise UserError(f"{location} has the type {_one_line(kind)}, which is not read; remove the column")
    for i in range(kind.num_fields):
        _refuse_extension(kind.field(i).type, location)


_READERS: dict[str, Callable[[Path, int | None], _Part]] = {
    ".jsonl": partial(_read_lines, _jsonl_rows),
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": partial(_read_lines, _csv_rows),
}


def _text(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}:{line}: not UTF-8: {error.reason}") from error


def _check_row(row: object, location: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(
            f"{location}: a row must be a JSON object with named columns, not {type(row).__name__}"
        )
    return row


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
