"""Tests preference rows of every shape; the byte-level tokenizer has <eos> 0, <pad> 1, "a" 66, "b" 67, ..."""

import pytest
import torch

from ppo_ds.assemble.data import unknown_characters
from ppo_ds.data.preferences import PairOrder, PreferenceSource
from ppo_ds.data.stream import Stream
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.rewards.text import TextEncoder
from tests.data.conftest import make_tokenizer, options_of

USER, GOOD, BAD = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "assistant", "content": "no"},
)
CHAT_PAIR = ("<user>hi<eos><assistant>yo<eos>", "<user>hi<eos><assistant>no<eos>")


@pytest.fixture
def source(jsonl, tokenizer):
    def make(*rows, **options):
        return PreferenceSource(jsonl(*rows), **options_of(**{"tokenizer": tokenizer, **options}))

    return make


def pairs(source):
    return [source.texts(i) for i in range(len(source))]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("a b", "a c")),
        ({"prompt": "a\n", "chosen": "b", "rejected": " c"}, ("a\nb", "a\n c")),
        ({"prompt": "a", "chosen": " b", "rejected": ""}, ("a b", "a ")),
        ({"chosen": "ab", "rejected": "c"}, ("ab", "c")),
        ({"prompt": "a", "response_A": "b", "response_B": "c", "preference": "A"}, ("a b", "a c")),
        ({"prompt": "a", "response_A": "b", "response_B": "c", "preference": "B"}, ("a c", "a b")),
    ],
)
def test_rows_of_texts(source, row, expected):
    assert pairs(source(row)) == [expected] and source(row).template == "text"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "yo", "rejected": "no"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # the prompt is repeated
        {
            "context": [USER],
            "completions": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}],
        },
    ],
)
def test_rows_of_chats(source, row):
    assert pairs(source(row)) == [CHAT_PAIR] and source(row).template == "chat"


def test_a_text_prompt_becomes_a_chat_on_request(source):
    row = {"prompt": "hi", "chosen": "yo", "rejected": "no"}
    assert pairs(source(row, apply_chat_template=True)) == [CHAT_PAIR]
    assert pairs(source(row)) == [("hi yo", "hi no")]  # although the tokenizer has a chat template


def test_texts_get_the_default_special_tokens_and_nothing_else(jsonl):
    tokenizer = make_tokenizer(adds_bos=True)
    path = jsonl({"prompt": "a", "chosen": "b", "rejected": "cd"})
    source = PreferenceSource(path, **options_of(tokenizer=tokenizer))
    batch = source.batch([0])
    assert batch.ids[0, 0, :4].tolist() == tokenizer.hf("a b")["input_ids"]
    assert batch.ids[0, 1].tolist() == tokenizer.hf("a cd")["input_ids"]
    assert batch.mask.tolist() == [[[True] * 4 + [False], [True] * 5]]
    assert batch.lengths.tolist() == [[4, 5]] and batch.trimmed().ids.shape == (1, 2, 5)


def test_ranked_answers_become_all_pairs_of_different_rank(source):
    ranked = source({"prompt": "p", "responses": ["a", "b", "c"]})  # from the best to the worst
    assert pairs(ranked) == [("p a", "p b"), ("p a", "p c"), ("p b", "p c")]
    tied = source({"prompt": "p", "responses": ["a", "b", "c"], "ranks": [2, 1, 2]})
    assert pairs(tied) == [("p b", "p a"), ("p b", "p c")]
    assert tied.report == {"rows": 1, "pairs": 2, "tied": 1, "identical": 0, "dropped": 0, "unknown": 0}


def test_identical_and_long_pairs_are_dropped_and_counted(source):
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": " a", "rejected": "a"},  # the same tokens
        {"prompt": "p", "chosen": "a", "rejected": "b" * 9},
        {"prompt": "p", "response_A": "a", "response_B": "b", "preference": "tie"},
    ]
    kept = source(*rows, max_tokens=10)
    assert kept.report == {"rows": 5, "pairs": 4, "tied": 1, "identical": 2, "dropped": 1, "unknown": 0}
    assert len(kept) == 1 and kept.longest == 3
    with pytest.raises(UserError, match="no pair of 1 rows is left: 1 are identical"):
        source(rows[1])


def test_margins_and_subsets(source):
    kept = source(
        {"chosen": "a", "rejected": "b", "margin": 1.5, "subset": "math"}, {"chosen": "c", "rejected": "d"}
    )
    assert kept.batch([1, 0]).margins.tolist() == [0.0, 1.5] and kept.subsets == ["math", None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, "no preference: needs the columns .* the row has: prompt, answer"),
        ({"response_A": "a", "response_B": "b", "preference": "C"}, "must be A, B or tie, not 'C'"),
        ({"chosen": "a", "rejected": 3}, 'column "rejected" must be a text or a list of messages, not int'),
        ({"chosen": "a", "rejected": " "}, 'column "rejected" is only white space'),
        ({"chosen": [USER], "rejected": [USER, BAD]}, 'column "chosen": the last message must be'),
        (
            {"chosen": "a", "rejected": "b", "margin": "much"},
            "column \"margin\" must be a number, not 'much'",
        ),
        ({"responses": ["a", "b"], "ranks": [1]}, 'column "ranks" must be a list of 2 numbers'),
        ({"completions": [{"completion": "a"}]}, 'column "completions", rank of answer 1 must be a number'),
        ({"chosen": "a", "rejected": "b", "tools": [1]}, 'column "tools"'),
        ({"chosen": "a", "rejected": [USER, BAD]}, "has a text, .* a chat"),
    ],
)
def test_bad_rows_are_named_with_their_line(source, row, message):
    with pytest.raises(UserError, match=message) as caught:
        source({"prompt": "p", "chosen": "a", "rejected": "b"}, row)
    assert "data.jsonl:2: " in str(caught.value) or "data.jsonl:2 " in str(caught.value)


def test_every_pass_has_all_pairs_and_keeps_the_pairs_of_a_row_together():
    order = PairOrder([3, 4, 6], seed=5, shuffle=True)
    passes = [[order[6 * k + i] for i in range(6)] for k in range(8)]
    assert all(sorted(each) == list(range(6)) for each in passes)
    assert all((each.index(1), each.index(2)) == (each.index(0) + 1, each.index(0) + 2) for each in passes)
    assert len({tuple(each) for each in passes}) > 1
    assert [PairOrder([3, 4, 6], 5, False)[i] for i in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_a_stream_continues_from_its_state(source):
    kept = source(*[{"chosen": f"{i}a", "rejected": f"{i}b"} for i in range(5)])
    options = dict(batch_size=2, seed=1, shuffle=True, key="reward_model.batch_size")
    stream = Stream(kept, **options)
    batches = [next(stream) for _ in range(6)]
    resumed = Stream(kept, **options)
    resumed.load_state_dict({"step": 4})
    assert torch.equal(next(resumed).ids, batches[4].ids) and stream.epoch == 2.4
    with pytest.raises(UserError, match="5 pairs are fewer than .*reward_model.batch_size=6"):
        Stream(kept, **options | {"batch_size": 6})


def test_the_joint_fits_the_tokenizer_and_unknown_characters_are_counted(source) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    characters = tiny.character_tokenizer("abc")
    made = source(row, row | {"chosen": "x"}, tokenizer=characters)
    assert pairs(made)[0] == ("ab", "ac") and (made.joint, made.report["unknown"]) == ("", 1)
    assert unknown_characters(made) == [
        f"warning    {made.path}: 1 texts have characters that the tokenizer does not know, which become its "
        "unknown token; correct the data, or use a model with another tokenizer"
    ]
    for joint in (None, made.joint):  # a reward encodes as the training did
        encoded = TextEncoder(characters, "text", None, None, joint=joint)({"prompt_text": "a"}, "b", True)
        assert characters.decode(encoded.ids, skip_special_tokens=False) == pairs(made)[0][0]
    assert pairs(source(row, joint=r"\n")) == [("a\nb", "a\nc")]
    assert source(row).joint == " " and unknown_characters(source(row)) == []
