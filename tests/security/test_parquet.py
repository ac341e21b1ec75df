"""Tests that a Parquet file cannot make a run open connections, import decoders, or take all memory."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ppo_ds.data.rows import load_rows
from ppo_ds.errors import UserError
from tests.data.test_rows import name_files
from tests.support.environment import environment

ROOT = Path(__file__).parents[2]
FEATURES = ("Image", "Audio", "Video", "Pdf", "Nifti", "NoSuchFeature")


def write_feature(file: Path, name: str, path: str) -> None:
    """Writes one row with a prompt and a column that the metadata declare as a feature, such as an image."""
    # the storage type of such features
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table({"prompt": ["a"], "x": pyarrow.array([{"bytes": None, "path": path}], kind)})
    told = {"features": {"prompt": {"dtype": "string", "_type": "Value"}, "x": {"_type": name}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": told})})
    pyarrow.parquet.write_table(table, file)


@pytest.fixture
def server():
    """Yields a port and the list of connections to it; each connection is closed at once."""
    listening, connections = socket.create_server(("127.0.0.1", 0)), []

    def accept() -> None:
        with contextlib.suppress(OSError):  # the socket was closed
            while True:
                connection, address = listening.accept()
                connections.append(address)
                connection.close()

    Thread(target=accept, daemon=True).start()
    yield listening.getsockname()[1], connections
    listening.close()


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_a_local_file_are_not_decoded(tmp_path, server, name):
    port, connections = server
    path = f"ftp://127.0.0.1:{port}/x"
    write_feature(tmp_path / "rows.parquet", name, path)
    with contextlib.suppress(Exception):
        rows = list(load_rows(str(tmp_path / "rows.parquet")))
    assert connections == []
    assert rows == [{"prompt": "a", "x": {"bytes": None, "path": path}}]


@pytest.mark.parametrize("name", [name for name in FEATURES if name != "NoSuchFeature"])
def test_features_of_a_hub_data_set_are_not_decoded(tmp_path, server, name, monkeypatch):
    port, connections = server
    path = f"ftp://127.0.0.1:{port}/x"
    (tmp_path / "hub").mkdir()
    write_feature(tmp_path / "hub" / "train.parquet", name, path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load = datasets.load_dataset
    name_files(monkeypatch)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, **options: load(str(tmp_path / "hub"), **options)
    )
    with contextlib.suppress(Exception):
        rows = list(load_rows("org/name"))
    assert connections == []
    assert rows == [{"prompt": "a", "x": {"bytes": None, "path": path}}]


def test_extension_types_are_refused_in_one_line(tmp_path):
    kind = datasets.features.features.Array2DExtensionType((1, 1), "int32")
    storage = pyarrow.array([[[1]]], kind.storage_type)
    table = pyarrow.table({"prompt": ["a"], "x": pyarrow.ExtensionArray.from_storage(kind, storage)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="rows.parquet: column x has the type .*; remove the column"):
        load_rows(str(tmp_path / "rows.parquet"))


def test_only_the_rows_that_are_asked_for_are_decoded(tmp_path):
    """A file of 100 KB holds 5,000 rows of 1 MB; the process that reads 10 rows has memory for 1,500."""
    file, schema = tmp_path / "rows.parquet", pyarrow.schema({"prompt": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for _ in range(50):
            writer.write_table(pyarrow.table({"prompt": ["x" * 2**20] * 100}))
    assert file.stat().st_size < 200_000
    code = (
        "import resource, sys; from ppo_ds.data.rows import load_rows\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 1500 * 2**20,) * 2)\n"
        "print(len(load_rows(sys.argv[1], max_rows=10)), 'rows')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        cwd=ROOT,
        env=environment(ARROW_DEFAULT_MEMORY_POOL="system"),  # other memory pools reserve more than they use
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "10 rows\n", done.stderr[-2000:]


def test_a_row_that_expands_is_refused_before_it_takes_all_memory(tmp_path, monkeypatch):
    """A file of 1 KB holds one row with a list of 100 million zeros, whose encoded size is a few bytes."""
    zeros = pyarrow.concat_arrays([pyarrow.array([0] * 10**6, pyarrow.int64())] * 100)
    row = pyarrow.ListArray.from_arrays(pyarrow.array([0, 10**8], pyarrow.int32()), zeros)
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "x": row}), file, compression="zstd")
    del zeros, row
    assert file.stat().st_size < 2**10
    monkeypatch.setattr("ppo_ds.data.rows._DECODER_BYTES", 2**29)
    with pytest.raises(UserError, match="rows.parquet: cannot be read as Parquet: .*alloc"):
        load_rows(str(file), max_rows=1)
    assert len(bytearray(2**31)) == 2**31  # the limit no longer applies


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        ("_MAX_BYTES", "its rows take more than 1 MB; set max_rows or split it"),
        ("_MAX_ROW_BYTES", "takes more than 1 MB"),
    ],
)
def test_a_file_that_expands_beyond_a_limit_is_refused(tmp_path, monkeypatch, limit, line):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x" * 2**21] * 3}), file, compression="zstd")
    assert file.stat().st_size < 2**16 and len(load_rows(str(file))) == 3
    monkeypatch.setattr(f"ppo_ds.data.rows.{limit}", 2**20)
    with pytest.raises(UserError) as caught:
        load_rows(str(file))
    assert str(caught.value).startswith(f"{file}: ") and str(caught.value).endswith(line)
