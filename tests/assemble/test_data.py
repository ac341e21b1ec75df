"""Tests stop_ids and the description of the data."""

from types import SimpleNamespace

import pytest

from ppo_ds.assemble.data import Inputs, describe_rows, stop_ids
from ppo_ds.errors import UserError
from tests.config.commands import MINIMAL, compose

VOCABULARY = {"a": 0, "b": 1, "c": 2, "far": 9}  # four tokens; ids 3 to 8 are unused
TOKENIZER = SimpleNamespace(stop_ids=(2,), vocab_size=4, hf=SimpleNamespace(get_vocab=lambda: VOCABULARY))


@pytest.mark.parametrize(("given", "ids"), [("null", (2,)), ("[]", ()), ("[0,3]", (0, 3)), ("[9]", (9,))])
def test_stop_token_ids(given, ids):
    assert stop_ids(compose(*MINIMAL, f"sampling.stop_token_ids={given}"), TOKENIZER) == ids


class Source(SimpleNamespace):
    """Rows of data, of which only the path and the report are known."""

    def __init__(self, path, report):
        super().__init__(path=path, report=report)

    def __len__(self):
        return self.report["rows"]


def test_the_counts_of_rows_are_reported():
    report = {"rows": 9, "truncated": 0, "dropped": 2, "lowered": 0, "repeated": 3, "same_id": 1}
    assert (
        describe_rows(report, "prompts")
        == '9 prompts, 2 dropped, 3 equal to an earlier one, 1 with the "id" of an earlier one'
    )
    assert describe_rows({"rows": 5, "truncated": 1, "dropped": 0}, "texts") == "5 texts, 1 truncated"
    held_out = Source("held.jsonl", report | {"dropped": 0, "repeated": 0, "same_id": 0})
    texts = SimpleNamespace(
        source=SimpleNamespace(path="texts.jsonl", report={"rows": 5, "truncated": 1, "dropped": 0})
    )
    inputs = Inputs(None, None, held_out, None, texts)
    assert (
        inputs.notes(None)
        == inputs.notes(9)
        == ["held out   held.jsonl: 9 prompts", "texts      texts.jsonl: 5 texts, 1 truncated"]
    )
    assert inputs.notes(6)[0] == (
        "held out   held.jsonl: 9 prompts; the first 6 are evaluated (eval.max_prompts)"
    )
    assert Inputs(None, None, None, None, None).notes(6) == []


@pytest.mark.parametrize("given", ["[4]", "[1,4]"])
def test_a_stop_id_outside_the_vocabulary_is_refused(given):
    with pytest.raises(UserError) as error:
        stop_ids(compose(*MINIMAL, f"sampling.stop_token_ids={given}"), TOKENIZER)
    (line,) = error.value.problems
    assert line == (
        "sampling.stop_token_ids: 4 is not a token: the actor's tokenizer has 4 "
        "tokens; remove it, or set null for the model's own end tokens"
    )
