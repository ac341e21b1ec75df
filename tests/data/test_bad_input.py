"""Tests invalid and unusual rows of data sets.

They are refused in one line with location and remedy, or handled as defined.
"""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from ppo_ds.data.prompts import PromptSource, PromptStream
from ppo_ds.data.token_rows import tokenizer_chunks
from ppo_ds.errors import UserError
from tests.data.conftest import options_of

USER = {"role": "user", "content": "hi"}
CHAT = json.dumps({"messages": [USER]})


def lines(*rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()


def said(path, tokenizer, **options):
    """Returns the lines of the UserError that the file causes, without the folder."""
    with pytest.raises(UserError) as caught:
        PromptSource(str(path), **options_of(tokenizer=tokenizer, max_new_tokens=9, **options))
    assert all(line.isprintable() for line in caught.value.problems)
    return [line.replace(f"{path.parent}/", "") for line in caught.value.problems]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("x.jsonl", b"", "data.path=x.jsonl: the data set is empty"),
        (
            "x.jsonl",
            lines({"prompt": "a"}, '{"prompt": "b"} x'),
            "x.jsonl:2: not a JSON object on one line: Extra data",
        ),
        (
            "x.jsonl",
            lines({"prompt": "a"}, "[" * 9**5),
            "x.jsonl:2: not a JSON object on one line: maximum recursion depth exceeded",
        ),
        (
            "x.jsonl",
            b"\x1f\x8b\x08\x00gz",
            "x.jsonl:1: not a JSON object on one line: 'utf-8' codec can't decode byte 0x8b",
        ),
        ("x.json", b'[{"prompt": "a", "n": ' + b"9" * 5000 + b"}]", "x.json:1: not JSON: Exceeds the limit"),
        (
            "x.csv",
            b"prompt,prompt\na,b\n",
            "x.csv:1: two columns have the same name (prompt, prompt); give each its own",
        ),
        (
            "x.csv",
            b'messages\n"[{""role"": ""user""}]"\n',
            ('x.csv:2: column "messages" must be a list of messages, not a text (CSV has no lists'),
        ),
        (
            "x.jsonl",
            lines({"b\n\ud800\x1b[2J": 1}),
            (
                r"x.jsonl:1: none of the columns prompt, messages, conversations; set "
                r"data.prompt_column to one"
            ),
        ),
        (
            "x.jsonl",
            lines({"messages": [USER | {"role": "us\ud800er"}]}),
            'x.jsonl:1: column "messages", message 1 is not valid Unicode',
        ),
        (
            "x.jsonl",
            lines({"messages": [USER | {"tool_calls": [1]}]}),
            'x.jsonl:1: column "messages", message 1: tool_calls are not shown',
        ),
        (
            "x.jsonl",
            lines({"messages": [USER], "tools": [{"name": "f"}]}),
            'x.jsonl:1: column "tools": tools are not shown to the policy',
        ),
    ],
)
def test_invalid_rows_are_refused(tmp_path, tokenizer, name, content, line):
    (tmp_path / name).write_bytes(content)
    (found,) = said(tmp_path / name, tokenizer)
    assert found.startswith(line) and len(found) < 700


def test_problems_of_rows_are_reported_together_up_to_a_limit(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_bytes(
        lines(*[{"prompt": ""}] * 3, *({"messages": [USER] * n + [0]} for n in range(9)))
    )
    found = said(tmp_path / "x.jsonl", tokenizer)
    assert found[0] == 'x.jsonl:1: column "prompt" is empty: fill it in or remove the row (and 2 more rows)'
    assert found[1].startswith('x.jsonl:4: column "messages", message 1')
    assert len(found) == 6 and found[-1] == "and 5 more problems"


def test_parquet_with_invalid_utf8(tmp_path, tokenizer):
    offsets = pyarrow.array([0, 2], type=pyarrow.int32()).buffers()[1]
    pyarrow.parquet.write_table(
        pyarrow.table(
            {"prompt": pyarrow.StringArray.from_buffers(1, offsets, pyarrow.py_buffer(b"\xff\xfe"))}
        ),
        tmp_path / "x.parquet",
    )
    (found,) = said(tmp_path / "x.parquet", tokenizer)
    assert found.startswith("x.parquet: cannot be read as Parquet: ") and "UTF8" in found


def test_a_file_format_that_fills_gaps_with_nulls(tmp_path, tokenizer):
    """In Parquet, rows with a text and rows with a chat both have both columns."""
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(
            [{"prompt": "a", "messages": None}, {"prompt": None, "messages": [USER | {"name": None}]}]
        ),
        tmp_path / "x.parquet",
    )
    made = PromptSource(str(tmp_path / "x.parquet"), **options_of(tokenizer=tokenizer, max_new_tokens=9))
    assert [row["prompt_text"] for row in made.batch([0, 1]).metadata] == [
        "<user>a<eos><assistant>",
        "<user>hi<eos><assistant>",
    ]


@pytest.mark.parametrize("call", ["open", "iterdir"])
def test_a_file_or_folder_without_permission(tmp_path, tokenizer, monkeypatch, call):
    """Simulates missing permissions, because root has every permission."""
    (tmp_path / "x.jsonl").write_bytes(lines({"prompt": "a"}))

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, os.strerror(13), str(self))

    monkeypatch.setattr(f"pathlib.Path.{call}", refuse)
    path = tmp_path / "x.jsonl" if call == "open" else tmp_path
    with pytest.raises(UserError, match=f"^data.path={path}: Permission denied$"):
        PromptSource(str(path), **options_of(tokenizer=tokenizer, max_new_tokens=9))


@pytest.mark.parametrize(
    "path", ["x" * 300 + ".jsonl", "~nobody-here/x.jsonl", "a\0b.jsonl", "a\nb.jsonl", "https://host/x.jsonl"]
)
def test_invalid_paths(tokenizer, path):
    with pytest.raises(UserError, match="^data.path=.*(no such file|File name too long)") as caught:
        PromptSource(path, **options_of(tokenizer=tokenizer, max_new_tokens=9))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "\x00",
        "a\x00\x01\x1b[31m\x7f",
        "a\u2028b\u2029c",
        "\ufeffa",
        "\u202eabc\u202c",
        "e\u0301 \U0001f468\u200d\U0001f469",
        "\u200b",
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_odd_characters_are_unchanged(tmp_path, byte_tokenizer, text, kind):
    content = lines({"prompt": text}) if kind == "jsonl" else f'prompt\n"{text}"\n'.encode()
    (tmp_path / f"x.{kind}").write_bytes(content)
    made = PromptSource(
        str(tmp_path / f"x.{kind}"), **options_of(tokenizer=byte_tokenizer(template=None), max_new_tokens=9)
    )
    batch = made.batch([0])
    assert batch.metadata[0]["prompt_text"] == text == made._tokenizer.decode(batch.ids[0].tolist())


def test_repeated_rows_are_counted(source):
    made = source(
        {"prompt": "a", "id": 1},
        {"prompt": "a", "id": 2},
        {"prompt": "b", "id": 2},
        {"prompt": "c", "id": "2"},
        {"prompt": "d", "id": None},
    )
    assert (len(made), made.report["repeated"], made.report["same_id"]) == (5, 1, 2)


def test_prompts_that_are_equal_after_truncation_count_as_repeated(source):
    assert source("xab", "yab", "ab", max_prompt_tokens=2).report["repeated"] == 2


def test_fewer_prompts_than_a_step_takes(source):
    made = source("a", "b", "c", long_prompts="drop", max_prompt_tokens=1)
    assert len(next(PromptStream(made, prompts_per_step=3))) == 3
    with pytest.raises(UserError) as caught:
        PromptStream(made, prompts_per_step=4)
    assert caught.value.problems == [
        f"data.path={made.path}: 3 prompts are fewer than one step takes (rollout.prompts_per_step=4); "
        "set rollout.prompts_per_step to at most 3, or add data"
    ]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([1] * 5, [(0, 5)]),
        ([1] * 2001, [(0, 1000), (1000, 2000), (2000, 2001)]),
        ([600_000, 400_000, 1, 2_000_000, 5], [(0, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_long_prompts_are_tokenized_in_small_chunks(sizes, parts):
    """As Python ints, a thousand prompts of 100,000 characters would need 10 GB."""
    assert [(part.start, part.stop) for part in tokenizer_chunks(sizes)] == parts


def test_one_example_for_each_sequence_of_roles(source):
    answer, system = {"role": "assistant", "content": "yo"}, {"role": "system", "content": "s"}
    made = source(
        "text",
        {"messages": [USER]},
        {"messages": [USER, answer, USER]},
        {"messages": [USER, answer]},
        {"messages": [system, USER]},
        "b",
    )
    assert [(place.rpartition(":")[2], row["prompt_text"]) for place, row in made.examples()] == [
        ("1", "text"),
        ("2", "<user>hi<eos><assistant>"),
        ("3", "<user>hi<eos><assistant>yo<eos><user>hi<eos><assistant>"),
        ("5", "<system>s<eos><user>hi<eos><assistant>"),
    ]


def test_rows_that_fail_a_check_are_named_unless_they_are_dropped(source):
    made = source(
        {"prompt": "a", "n": 1},
        {"prompt": "long", "n": 2},
        {"prompt": "c", "n": 3},
        max_prompt_tokens=2,
        long_prompts="drop",
    )

    def check(row):
        if row["n"] > 1:
            raise UserError("no answer")

    with pytest.raises(UserError) as caught:
        made.check_rows(check)
    assert caught.value.problems == [f"{made.path}:3: no answer"]
