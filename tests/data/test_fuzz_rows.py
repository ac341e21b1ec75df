"""Tests that random files give prompts whose ids decode to the input, or errors that name the location."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppo_ds.data.prompts import PromptSource
from ppo_ds.errors import UserError
from tests.data.conftest import make_tokenizer, options_of

CHATTY, PLAIN = make_tokenizer(), make_tokenizer(template=None)
OPTIONS = dict(max_new_tokens=9, max_prompt_tokens=10**6)

texts = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zs"]), max_size=4),
    st.sampled_from(["hi", "<eos>", "<pad>"]),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(["user", "assistant", "system", "tool"])
messages = st.one_of(
    st.fixed_dictionaries({"role": roles, "content": texts}, optional={"name": texts}),
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system", "alien"]), "value": texts}),
    st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls"]), values, max_size=3),
)
wild = st.dictionaries(
    st.sampled_from(["prompt", "messages", "conversations", "max_new_tokens", "id", "tools", "answer"]),
    st.one_of(texts, values, st.lists(messages, max_size=4)),
)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
extras = st.fixed_dictionaries(
    {}, optional={"id": leaves, "answer": values, "max_new_tokens": st.integers(1, 20), "tools": st.just([])}
)
chats = st.lists(st.fixed_dictionaries({"role": roles, "content": words}), max_size=3).map(
    lambda turns: [*turns, {"role": "user", "content": "?"}]
)
good = st.tuples(
    st.one_of(words.map(lambda text: {"prompt": text}), chats.map(lambda chat: {"messages": chat})), extras
).map(lambda parts: parts[0] | parts[1])
files = st.sampled_from([
    ("x.jsonl", b'{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n'),
    ("x.json", b'[{"prompt": "one"},\n {"prompt": "two", "n": [1, null]}]'),
    ("x.csv", b'prompt,n\none,1\n"t""w\no",2\n'),
])  # fmt: skip
noise = st.one_of(
    st.binary(max_size=3), st.text('[]{}":,\n\r\\ pu\ufeff\x00\u2028', max_size=5).map(str.encode)
)
spliced = st.tuples(files, st.integers(0, 90), st.integers(0, 3), noise).map(
    lambda drawn: (drawn[0][0], drawn[0][1][: drawn[1]] + drawn[3] + drawn[0][1][drawn[1] + drawn[2] :])
)
nonsense = st.tuples(st.sampled_from(["x.jsonl", "x.json", "x.csv", "x.parquet"]), st.binary(max_size=60))


def read(name: str, content: bytes, tokenizer=CHATTY) -> PromptSource | None:
    """Returns the file's prompts, or None if it is refused with a valid error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        try:
            return PromptSource(str(file), **options_of(tokenizer=tokenizer, **OPTIONS))
        except UserError as error:
            for line in error.problems:
                assert line.isprintable(), line
                place = re.escape(str(file))
                assert re.match(
                    rf"{place}(:\d+| row \d+)?: |data\.path={place}: the data set is empty$|and \d+ more "
                    r"problems?$",
                    line,
                ), line
            return None


def expect_texts(source: PromptSource) -> None:
    """Checks that the ids decode to the prompt's text, which contains the texts of the row."""
    batch = source.batch(range(len(source)))
    for ids, mask, row in zip(batch.ids, batch.mask, batch.metadata, strict=True):
        assert source._tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False) == row["prompt_text"]
        said = [message["content"] for message in row.get("messages", [])]
        assert all(text in row["prompt_text"] for text in said)
    assert batch.limits.min() >= 1 and batch.limits.max() <= OPTIONS["max_new_tokens"]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(spliced | nonsense)
@example(("x.jsonl", b'{"prompt": "a", "x": ' + b"[" * 100_000))
@example(("x.json", b"[" * 100_000))
@example(("x.json", b'[{"prompt": "a", "n": ' + b"1" * 5000 + b"}]"))
@example(("x.csv", b"\n\nprompt\na\n"))
@example(("x.csv", b"prompt,prompt\na,b\n"))
def test_any_bytes(file: tuple[str, bytes]) -> None:
    source = read(*file)
    if source is not None:
        expect_texts(source)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(good, min_size=1, max_size=3) | st.lists(good | wild, min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["jsonl", "json"]),
)
def test_any_rows(given: list[dict], chatty: bool, kind: str) -> None:
    text = json.dumps(given) if kind == "json" else "\n".join(map(json.dumps, given))
    source = read(f"x.{kind}", text.encode(), CHATTY if chatty else PLAIN)
    if source is not None:
        assert len(source) == len(given)
        expect_texts(source)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(words, min_size=1, max_size=4), st.sampled_from(["jsonl", "csv", "json"]))
def test_any_text_is_unchanged(prompts: list[str], kind: str) -> None:
    if kind == "csv":
        content = "prompt\r\n" + "\r\n".join('"' + prompt.replace('"', '""') + '"' for prompt in prompts)
    else:
        lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
        content = "\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]"
    source = read(f"x.{kind}", content.encode(), PLAIN)
    assert [row["prompt_text"] for row in source.batch(range(len(prompts))).metadata] == prompts
    expect_texts(source)
