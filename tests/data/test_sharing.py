"""Tests that ranks share the tokenization of a data set, and that a Hub data set is loaded once per node.

The ranks are threads. The expected data is that of a process on its own.
"""

from __future__ import annotations

import threading
from array import array
from functools import partial

import datasets
import pytest

from ppo_ds.data import sharing
from ppo_ds.data.demonstrations import DemonstrationSource
from ppo_ds.data.preferences import PreferenceSource
from ppo_ds.data.prompts import PromptSource
from ppo_ds.data.rows import load_rows
from ppo_ds.data.sharing import all_gather_array, shares
from ppo_ds.errors import UserError
from tests.data.conftest import make_tokenizer, options_of
from tests.data.test_rows import name_files
from tests.ppo.conftest import run_ranks

WORDS = ["a", "", "bcd" * 50, "efg", "h" * 7, "ij", "klmnop", "q", "rst" * 9, "uv", "wxyz"]
PROMPTS = [
    {"prompt": f"{word}?" if i % 3 else [{"role": "user", "content": f"{word}!"}], "id": i % 4}
    for i, word in enumerate(WORDS)
]
DEMONSTRATIONS = [
    *({"prompt": row["prompt"], "response": f"{i}"} for i, row in enumerate(PROMPTS)),
    {"text": "xyz"},
]
PREFERENCES = [
    *({"prompt": "p", "chosen": word, "rejected": "no"} for word in WORDS),
    {"prompt": "q", "completions": ["best", "good", "bad"]},
]
MAKE = {
    "prompts": (partial(PromptSource, **options_of(max_new_tokens=9, max_prompt_tokens=20)), PROMPTS),
    "demonstrations": (
        partial(DemonstrationSource, **options_of(max_tokens=20, learn="all")),
        DEMONSTRATIONS,
    ),
    "preferences": (partial(PreferenceSource, **options_of(max_tokens=40)), PREFERENCES),
}


class Counted:
    """A tokenizer that records the texts it encodes."""

    def __init__(self):
        self.tokenizer, self.texts = make_tokenizer(), []
        self._encode, self.tokenizer.encode_many = self.tokenizer.encode_many, self.encode

    def encode(self, texts, special_tokens):
        self.texts += texts
        return self._encode(texts, special_tokens)


def content(source):
    """Returns everything that a source has read, as plain objects."""
    return {
        name: list(value) if isinstance(value, sharing.TokenRows | array) else value
        for name, value in vars(source).items()
        if name not in ("_tokenizer", "_rows", "_file_rows", "_format")
    }


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("kind", MAKE)
def test_ranks_tokenize_each_row_once_and_get_the_same_data(kind, ranks, jsonl, monkeypatch):
    monkeypatch.setattr(sharing, "EXCHANGED_IDS", 7 * ranks)  # so that many collectives are needed
    make, rows = MAKE[kind]
    path, alone = jsonl(*rows), Counted()
    expected = make(path, tokenizer=alone.tokenizer)
    counted = [Counted() for _ in range(ranks)]
    sources = run_ranks(ranks, lambda world: make(path, tokenizer=counted[world.rank].tokenizer, world=world))
    for source in sources:
        assert content(source) == content(expected)
        assert vars(source.batch([0, 3, 1])).keys() == vars(expected.batch([0, 3, 1])).keys()
    shares_of_work = [len(each.texts) for each in counted]
    assert sorted(text for each in counted for text in each.texts) == sorted(alone.texts)
    assert max(shares_of_work) < len(alone.texts)


def chats(kind, content):
    """Returns a row of chats that begin with a message of the user."""
    user = {"role": "user", "content": content}
    yes, no = ({"role": "assistant", "content": text} for text in ("yes", "no"))
    row = {"prompt": [user], "response": "yes"}
    return {"chosen": [user, yes], "rejected": [user, no]} if kind == "preferences" else row


@pytest.mark.parametrize("kind", MAKE)
def test_a_row_that_cannot_be_tokenized_has_the_same_error_on_all_ranks(kind, jsonl):
    path = jsonl(*(chats(kind, "bad" if i in (7, 8) else "go") for i in range(10)))
    template = "{{ raise_exception('no') if messages[0].content == 'bad' else messages[-1].content }}"

    def load(world=None):
        tokenizer = make_tokenizer(template=template)
        with pytest.raises(UserError) as error:
            MAKE[kind][0](path, tokenizer=tokenizer, world=world)
        return error.value.problems

    assert run_ranks(3, load) == [load()] * 3
    assert len(load()) == 1 and "data.jsonl:8: the chat template refuses" in load()[0]


@pytest.mark.parametrize("changed", [{"prompt": "ba"}, {"answer": 2}])
def test_nodes_with_different_files_are_refused(changed, jsonl):
    row = {"prompt": "ab", "answer": 1}
    same, other = jsonl(row, name="0.jsonl"), jsonl(row | changed, name="1.jsonl")

    def load(world):
        path = [same, same, other][world.rank]
        PromptSource(path, **options_of(tokenizer=make_tokenizer(), max_new_tokens=9, world=world))

    with pytest.raises(UserError, match=r"^data.path=.*: ranks 0 and 2 read different data from it; give"):
        run_ranks(3, load)


def test_a_file_that_only_some_nodes_have_is_an_error_on_all_ranks(jsonl, tmp_path):
    path = jsonl({"prompt": "ab"})

    def load(world):
        with pytest.raises(UserError) as error:
            load_rows(path if world.rank == 0 else str(tmp_path / "none.jsonl"), world=world)
        return str(error.value)

    assert {line.partition(": ")[2] for line in run_ranks(3, load)} == {"no such file or folder"}


@pytest.mark.parametrize("sizes", [[], [0, 0, 0], [5], [1, 2, 3, 4], [9, 0, 0, 1], [1] * 100])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_shares_are_all_rows_in_order(sizes, count):
    parts = shares(sizes, count)
    assert len(parts) == count
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(sizes)))


def test_shares_have_about_the_same_number_of_characters():
    assert shares([10, 1, 1, 8, 5, 5], 3) == [slice(0, 1), slice(1, 4), slice(4, 6)]


@pytest.mark.parametrize("exchanged", [1, 8, 1000])
def test_arrays_of_different_lengths_are_concatenated(exchanged, monkeypatch):
    monkeypatch.setattr(sharing, "EXCHANGED_IDS", exchanged)
    parts = [array("I", [2**32 - 1, 7, 0]), array("I"), array("I", range(10))]
    joined = run_ranks(3, lambda world: all_gather_array(world, parts[world.rank]))
    assert joined == [array("I", [2**32 - 1, 7, 0, *range(10)])] * 3


@pytest.mark.parametrize(("split", "loads"), [("train", [0, 2]), ("train[:50%]", [0, 1, 2, 3])])
def test_one_rank_of_each_node_asks_the_hub_for_a_data_set(split, loads, tmp_path, jsonl, monkeypatch):
    path, load_dataset = jsonl(*PROMPTS[2::3]), datasets.load_dataset
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    this_rank, loading = threading.local(), []

    def load(name, *, split, revision):
        loading.append(this_rank.number)
        return load_dataset("json", data_files={"train": path}, split=split)

    def read(world):
        this_rank.number = world.rank
        return list(load_rows("org/name", split=split, world=world))

    monkeypatch.setattr(datasets, "load_dataset", load)
    name_files(monkeypatch)
    expected = list(load_dataset("json", data_files={"train": path}, split=split))
    assert len(expected) == (3 if split == "train" else 2) and "prompt" in expected[0]
    assert run_ranks(4, read, nodes=2) == [expected] * 4
    assert sorted(loading) == loads
