import json
import multiprocessing
import os
import re
from threading import Thread
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ppo_ds.data.rows import existing_file, load_rows, parse_rows
from ppo_ds.errors import UserError

ROWS = [
    {"prompt": 'one\ntwo, "three"', "answer": "1"},
    {"prompt": "naïve \u2028 \U0001f600 \x01", "answer": "2"},
]


def write_all(folder):
    """Writes the same rows in every format."""
    (folder / "a.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8"
    )
    (folder / "b.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "c.parquet")
    quoted = [",".join('"' + value.replace('"', '""') + '"' for value in row.values()) for row in ROWS]
    (folder / "d.csv").write_text("\n".join(["prompt,answer", *quoted]) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "c.parquet", "d.csv"])
def test_every_format_gives_the_same_rows(tmp_path, name):
    write_all(tmp_path)
    rows = load_rows(str(tmp_path / name), split="ignored", revision="ignored")
    assert list(rows) == ROWS and rows[1] == ROWS[1] and len(rows) == 2


def fingerprint(path):
    """Returns the fingerprint of the rows of a file."""
    return parse_rows(None, load_rows(str(path)), dict, "data.path", str(path))[1]


def test_a_fingerprint_depends_on_the_rows_only(tmp_path):
    write_all(tmp_path)
    found = [fingerprint(tmp_path / name) for name in ("a.jsonl", "b.json", "c.parquet", "d.csv")]
    assert len({each.digest for each in found}) == 1 and {each.rows for each in found} == {2}


@pytest.mark.parametrize(
    "changed", [ROWS[::-1], [*ROWS, ROWS[0]], [ROWS[0], ROWS[1] | {"answer": "3"}], ROWS[:1]]
)
def test_a_fingerprint_depends_on_every_row_and_their_order(tmp_path, changed):
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(json.dumps(changed))
    assert fingerprint(tmp_path / "a.json").digest != fingerprint(tmp_path / "b.json").digest


def test_locations(tmp_path):
    write_all(tmp_path)
    (tmp_path / "README.md").write_text("not data")
    rows = load_rows(str(tmp_path))
    assert list(rows) == ROWS * 4 and rows[6] == ROWS[0]
    assert [rows.location(i).removeprefix(f"{tmp_path}/") for i in range(8)] == [
        "a.jsonl:1", "a.jsonl:2", "b.json row 1", "b.json row 2", "c.parquet row 1",
        "c.parquet row 2", "d.csv:2", "d.csv:4"
    ]  # fmt: skip


def test_blank_lines_are_skipped_but_counted(jsonl):
    rows = load_rows(jsonl({"prompt": "a"}, "", {"prompt": "b"}))
    assert [rows.location(i).rsplit(":")[-1] for i in range(len(rows))] == ["1", "3"]


def test_rows_keep_their_values(jsonl):
    """Arrow would add nulls for columns that only other rows have, and refuse mixed types."""
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "x", "extra": {"k": [1, "y"]}}]
    assert list(load_rows(jsonl(*rows))) == rows


def test_json_file_with_one_row_per_line(jsonl):
    assert list(load_rows(jsonl(*ROWS, name="x.json"))) == ROWS


def test_byte_order_mark_and_crlf(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbfprompt\r\na\r\nb\r\n")
    assert list(load_rows(str(tmp_path))) == [{"prompt": "a"}, {"prompt": "b"}] * 2


@pytest.mark.parametrize(("n", "places"), [(1, 1), (3, 3), (7, 7), (99, 8)])
def test_max_rows_over_several_files(tmp_path, n, places):
    write_all(tmp_path)
    assert list(load_rows(str(tmp_path), max_rows=n)) == (ROWS * 4)[:places]


def test_max_rows_reads_no_further(jsonl):
    assert len(load_rows(jsonl({"prompt": "a"}, "{half"), max_rows=1)) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "x.jsonl",
            b'{"prompt": "a"}\n{"prompt": "b"\n',
            "x.jsonl:2: not a JSON object on one line: Expecting ',' delimiter at character 16",
        ),
        ("x.jsonl", b'{"prompt": "a"}\n\n{"promp', "x.jsonl:3: not a JSON object on one line"),
        (
            "x.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xff"}\n',
            "x.jsonl:2: not a JSON object on one line: 'utf-8'",
        ),
        (
            "x.jsonl",
            b'{"prompt": "a"}\n["b"]\n',
            "x.jsonl:2: a row must be a JSON object with named columns, not list",
        ),
        ("x.json", b'[{"prompt": "a"},\n 5]', "x.json row 2: a row must be a JSON object"),
        ("x.json", b'[{"prompt": "a"},\n {"prompt"]', "x.json:2: not JSON"),
        ("x.json", b'{\n "prompt": "a"}', "x.json:1: not a JSON object on one line"),
        ("x.csv", b'prompt,n\na,1\n"b\nc",2,3\n', "x.csv:3: 3 values for 2 columns"),
        ("x.csv", b'prompt,n\na,1\n"b,2\nd,3\n', "x.csv:3: not CSV"),
        ("x.csv", b"prompt\na\n\xff\n", "x.csv:3: not UTF-8"),
        ("x.parquet", b"PAR1nonsense", "x.parquet: cannot be read as Parquet"),
        ("x.jsonl", b"", "the data set is empty"),
        ("x.csv", b"prompt\n", "the data set is empty"),
        ("x.json", b"[]", "the data set is empty"),
        ("x.txt", b"a", "the name of a data file must end in one of .jsonl"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_rows(str(tmp_path / name))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.jsonl", "/nowhere/at/all", "./here", "a/b/c"])
def test_missing_file(path):
    with pytest.raises(UserError, match=f"data.eval_path={path}: no such file"):
        load_rows(path, key="data.eval_path")


def test_folder_without_data(tmp_path):
    with pytest.raises(UserError, match="no .jsonl, .json, .parquet, .csv file in this folder"):
        load_rows(str(tmp_path))


@pytest.mark.parametrize("kind", ["directory", "device", "pipe", "link to nothing"])
def test_what_is_not_a_regular_file_is_refused(tmp_path, kind):
    file = tmp_path / "x.jsonl"
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
        Thread(target=file.write_text, args=('{"prompt": "a"}',), daemon=True).start()
    else:
        file.symlink_to("/dev/null" if kind == "device" else tmp_path / "nothing")
    with pytest.raises(UserError, match="x.jsonl: is not a regular file, or a link to nothing$"):
        load_rows(str(tmp_path))


def _load_here(path, cache):
    datasets.config.HF_DATASETS_CACHE = cache
    return len(load_rows(path)), os.listdir(cache)


def test_local_files_write_nothing_to_a_shared_cache(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "cache").mkdir()
    write_all(tmp_path / "data")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert (
            pool.starmap(_load_here, [(str(tmp_path / "data"), str(tmp_path / "cache"))] * 2) == [(8, [])] * 2
        )


def name_files(monkeypatch, *files):
    """Lets Hub data sets name these files as their data."""
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": [], "test": files}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, **options: builder)


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """Returns the folder whose files ``datasets`` loads as the Hub data set "org/name"."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": split}) + "\n")
    load_dataset = datasets.load_dataset

    def load(path, **options):
        assert path == "org/name"
        return load_dataset(str(folder), **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    name_files(monkeypatch, "hf://datasets/org/name@main/train.jsonl")
    return folder


def test_files_that_a_hub_data_set_names_elsewhere(hub_folder, monkeypatch):
    for source in ("/home/me/private.jsonl", "file:///etc/passwd", "ftp://10.0.0.1/x.csv", "http://a/b.json"):
        name_files(monkeypatch, "hf://datasets/org/name@main/test.jsonl", source)
        for path in ("org/name", "hf://datasets/org/name/test.jsonl"):
            with pytest.raises(UserError, match=re.escape(f"={path}: the data set names a file outside of")):
                load_rows(path, split="test")


def test_hub_split(hub_folder):
    rows = load_rows("org/name", split="test")
    assert list(rows) == [{"prompt": "test"}] and rows.location(0) == "org/name[test] row 1"


def test_a_file_of_a_hub_data_set(hub_folder):
    rows = load_rows("hf://datasets/org/name/test.jsonl", split="any")
    assert list(rows) == [{"prompt": "test"}]
    assert rows.location(0) == "hf://datasets/org/name/test.jsonl row 1"
    with pytest.raises(
        UserError, match="hf://org/name/test.jsonl: .* the form hf://datasets/OWNER/NAME/FILE"
    ):
        load_rows("hf://org/name/test.jsonl")


@pytest.mark.parametrize(
    ("on_hub", "found"),
    [("ab", "a"), ("a", "a"), ("b", "b"), ("", "b")],
    ids=["both", "first", "last", "none"],
)
def test_the_first_of_two_files_that_exists(monkeypatch, on_hub, found):
    def builder(name, revision, data_files):
        assert (name, revision) == ("org/name", "v1")
        if data_files.removesuffix(".jsonl") not in on_hub:
            raise datasets.exceptions.DataFilesNotFoundError(data_files)

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    path = "hf://datasets/org/name/a.jsonl|b.jsonl"
    assert existing_file(path, "v1", None) == f"hf://datasets/org/name/{found}.jsonl"
    for other in ("hf://datasets/org/name/b.jsonl", "org/name", "x|y.jsonl", "dir/x|y.jsonl"):
        assert existing_file(other, "v1", None) == other


def test_unknown_split_lists_the_valid_ones(hub_folder):
    with pytest.raises(UserError, match=r"data.eval_path=.*, data.eval_split=dev: .*\['train', 'test'\]"):
        load_rows("org/name", split="dev", key="data.eval_path")


def test_split_that_cannot_be_read(hub_folder):
    (hub_folder / "test.jsonl").write_text('{"prompt": "a"}\n{"promp')
    with pytest.raises(UserError, match="data.path="):
        load_rows("org/name", split="test")


def test_unreachable_hub(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="data.path=nobody/nothing: .*nobody/nothing"):
        load_rows("nobody/nothing")


def test_hub_rows_come_through_load_rows(monkeypatch):
    name_files(monkeypatch)
    rows = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda path, split, revision: {("org/name", "dev", "v1"): rows}[path, split, revision],
    )
    loaded = load_rows("org/name", split="dev", revision="v1", max_rows=1)
    assert list(loaded) == ROWS[:1] and loaded.location(0) == "org/name[dev] row 1"
