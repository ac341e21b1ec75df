"""Tests ids and the mask of learned tokens of a language-modelling loss against values written by hand.

The byte-level tokenizer has <eos> 0, <pad> 1, "a" 66, "b" 67, ...; its template writes
"<user>hi<eos><assistant>", then the answer and "<eos>".
"""

from itertools import islice

import pytest
import torch

from ppo_ds.data.demonstrations import DemonstrationSource
from ppo_ds.data.stream import Stream
from ppo_ds.errors import UserError
from ppo_ds.models.policy import Policy
from ppo_ds.models.tiny import tiny_llama
from ppo_ds.run.microbatches import microbatches
from tests.data.conftest import options_of

A, B, C, D, E = range(66, 71)
EOS, PAD = 0, 1
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}


@pytest.fixture
def source(jsonl, tokenizer):
    def make(*rows, **options):
        rows = [{"text": row} if isinstance(row, str) else row for row in rows]
        return DemonstrationSource(jsonl(*rows), **options_of(**{"tokenizer": tokenizer, **options}))

    return make


def learned(batch, tokenizer):
    """Returns the prompt and the learned text of each row."""
    pairs = []
    for ids, mask, response in zip(batch.ids, batch.attention_mask, batch.response_mask, strict=True):
        taught = torch.cat([torch.tensor([False]), response])
        pairs.append(
            tuple(
                tokenizer.decode(ids[each].tolist(), skip_special_tokens=False)
                for each in (mask & ~taught, taught)
            )
        )
    return pairs


def test_all_tokens_of_a_text_but_the_first_are_learned(source):
    batch = source("abc", "d").batch([1, 0])
    assert batch.ids.tolist() == [[D, EOS, PAD, PAD], [A, B, C, EOS]]
    assert batch.attention_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.response_mask.tolist() == [[True, False, False], [True] * 3]
    assert (batch.prompt_width, batch.response_width) == (1, 3) and batch.ids.dtype == torch.int64


def test_after_a_text_prompt_the_answer_and_its_end_are_learned(source):
    rows = [
        {"prompt": "ab", "response": "cd"},
        {"prompt": "abc", "answer": "d"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "chosen": "c"},
    ]
    batch = source(*rows, apply_chat_template=False).batch([0, 1, 2, 3])
    assert batch.ids.tolist() == [
        [A, B, C, D, EOS],
        [A, B, C, D, EOS],
        [A, B, EOS, PAD, PAD],
        [A, C, EOS, PAD, PAD],
    ]
    assert batch.response_mask.int().tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert batch.attention_mask.sum(1).tolist() == [5, 5, 3, 3]


GIVEN = "<user>hi<eos><assistant>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"prompt": "hi", "response": "yo"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
        {"chosen": [USER, ANSWER]},
        {"prompt": "something else", "messages": [USER, ANSWER], "response": None},
    ],
)
def test_the_last_answer_of_a_chat_and_its_end_are_learned(source, tokenizer, row):
    batch = source(row).batch([0])
    assert learned(batch, tokenizer) == [(GIVEN, "yo<eos>")]
    # the same ids as in generation; <eos> is one token of five characters
    assert (
        batch.ids[0, : len(GIVEN) - 4].tolist()
        == tokenizer.encode_many([tokenizer.render_chat([USER])], special_tokens=False)[0]
    )


def test_earlier_answers_are_not_learned_and_a_system_message_is_added(source, tokenizer):
    batch = source({"messages": [USER, {**ANSWER, "content": "no"}, USER, ANSWER]}, system="s").batch([0])
    assert learned(batch, tokenizer) == [
        ("<system>s<eos><user>hi<eos><assistant>no<eos><user>hi<eos><assistant>", "yo<eos>")
    ]


def test_template_text_after_the_end_token_is_not_learned(source, byte_tokenizer):
    line = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}\n{% "
        "endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = byte_tokenizer(template=line)
    assert learned(source({"messages": [USER, ANSWER]}, tokenizer=tokenizer).batch([0]), tokenizer) == [
        ("user:hi<eos>\nassistant:", "yo<eos>")
    ]


def test_a_template_without_an_end_token_gets_one(source, byte_tokenizer):
    tokenizer = byte_tokenizer(
        template=(
            "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }} {% endfor %}{% if "
            "add_generation_prompt %}assistant:{% endif %}"
        )
    )
    assert learned(source({"messages": [USER, ANSWER]}, tokenizer=tokenizer).batch([0]), tokenizer) == [
        ("user:hi assistant:", "yo <eos>")
    ]


def test_a_text_keeps_the_end_tokens_within_it_and_gets_no_second_one(source):
    batch = source("a<eos>b", "a<eos>").batch([0, 1])
    assert batch.ids.tolist() == [[A, EOS, B, EOS], [A, EOS, PAD, PAD]]


def test_texts_get_the_tokenizers_own_first_token_and_answers_do_not(source, byte_tokenizer):
    made = source(
        "a",
        {"prompt": "a", "response": "b"},
        apply_chat_template=False,
        tokenizer=byte_tokenizer(adds_bos=True),
    )
    batch = made.batch([0, 1])
    assert batch.ids.tolist() == [[EOS, A, EOS, PAD], [EOS, A, B, EOS]]
    assert batch.response_mask.int().tolist() == [[1, 1, 0], [0, 1, 1]]


def test_pad_is_eos(source, byte_tokenizer):
    batch = source("abc", "a", tokenizer=byte_tokenizer(pad=None)).batch([0, 1])
    assert batch.ids.tolist() == [[A, B, C, EOS], [A, EOS, EOS, EOS]]
    assert batch.attention_mask[1].tolist() == [True, True, False, False] and batch.response_mask[
        1
    ].tolist() == [True, False, False]


def test_long_rows_are_truncated_on_the_right_and_dropped_without_an_answer(source):
    rows = [
        "abcd",
        "ab",
        {"prompt": "ab", "response": "cde"},
        {"prompt": "abc", "response": "d"},
        {"prompt": "abcde", "response": "d"},
    ]
    made = source(*rows, max_tokens=3, apply_chat_template=False)
    assert (
        made.report == {"rows": 5, "truncated": 2, "dropped": 2, "unknown": 0}
        and len(made) == 3
        and made.longest == 3
    )
    batch = made.batch([0, 1, 2])
    assert batch.ids.tolist() == [[A, B, C], [A, B, EOS], [A, B, C]]
    assert batch.response_mask.int().tolist() == [[1, 1], [1, 1], [0, 1]]


def test_dropping_everything_is_an_error(source):
    with pytest.raises(
        UserError,
        match="data.ptx_path=.*: all 1 rows are dropped: their answers begin after data.ptx_max_tokens=2",
    ):
        source({"prompt": "ab", "response": "c"}, max_tokens=2, apply_chat_template=False)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a"},
            (
                'nothing to learn: needs a column "text", or "prompt" and one of response, '
                "answer, .*; the row has: prompt"
            ),
        ),
        ({"prompt": "a", "response": 5}, 'column "response" must be a text, not int'),
        ({"prompt": "a", "response": ""}, 'column "response" is empty'),
        ({"prompt": 5, "response": "a"}, 'column "prompt" must be a text or a list of messages, not int'),
        ({"text": ["a"]}, 'column "text" must be a text, not list'),
        (
            {"messages": [USER]},
            'column "messages": nothing to learn: the last message must be the assistant\'s',
        ),
        ({"messages": [ANSWER]}, 'column "messages": nothing to answer'),
        ({"messages": []}, 'column "messages": nothing to learn'),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, 'column "messages" is empty'),
        ({"prompt": "a", "chosen": [USER]}, 'column "chosen": nothing to learn'),
        ({"messages": [USER, ANSWER], "tools": [{"name": "x"}]}, 'column "tools": tools are not shown'),
    ],
)
def test_bad_rows_are_named(source, row, message):
    with pytest.raises(UserError, match=f"data.jsonl:2: {message}"):
        source("ok", row)


def test_a_template_that_renders_an_answered_prompt_differently(source, byte_tokenizer):
    thinking = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if "
        "add_generation_prompt %}<assistant><think>{% endif %}"
    )
    with pytest.raises(
        UserError, match=r"data.jsonl:1: the chat template renders the prompt differently once it is answered"
    ):
        source({"messages": [USER, ANSWER]}, tokenizer=byte_tokenizer(template=thinking))


def test_chats_need_a_template(source, byte_tokenizer):
    with pytest.raises(UserError, match=r"data.jsonl:2: a chat, but the tokenizer has no chat template"):
        source("a", {"messages": [USER, ANSWER]}, tokenizer=byte_tokenizer(template=None))


# ---- the stream


KEY = "algo.ptx.batch_size"


def take(stream, steps):
    return [
        [row[mask].tolist() for row, mask in zip(batch.ids, batch.attention_mask, strict=True)]
        for batch in islice(stream, steps)
    ]


def test_unshuffled_passes_have_the_rows_in_order(source):
    made = source("a", "b", "c")
    stream = Stream(made, key=KEY, batch_size=2, seed=2, shuffle=False)
    assert [[row[0] for row in step] for step in take(stream, 3)] == [[A, B], [C, A], [B, C]]
    assert stream.epoch == 2.0 and stream.indices(1) == [2, 0]


def test_fewer_texts_than_a_batch(source):
    with pytest.raises(
        UserError,
        match=(
            r"data.ptx_path=.*: 2 texts are fewer than one step takes "
            r"\(algo.ptx.batch_size=3\); set .* at most 2"
        ),
    ):
        Stream(source("a", "b"), key=KEY, batch_size=3)


def test_batches_go_through_microbatches(source):
    """Each learned token is in exactly one micro-batch of exactly one of the two ranks."""

    class World:
        data_size, sequence_ranks = 2, 1

        def __init__(self, rank):
            self.data_rank = rank

    batch = next(
        Stream(
            source("abcde", "a", {"prompt": "abc", "response": "d"}, "ab", apply_chat_template=False),
            batch_size=4,
            key=KEY,
        )
    )
    assert batch.prompt_lengths.tolist() == [1] * 4
    parts = [microbatches(batch, 7, World(rank)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) and all(
        part.ids.numel() <= 7 and part.prompt_width == 1 for part in sum(parts, [])
    )
    actions = sorted(
        token for part in sum(parts, []) for token in part.ids[:, 1:][part.response_mask].tolist()
    )
    assert actions == sorted([B, C, D, E, EOS] + [EOS] + [D, EOS] + [B, EOS])


def test_a_policy_gives_the_loss_that_transformers_gives(source, tokenizer):
    """Compares the mean of -log p over the learned tokens to the loss of transformers."""
    torch.manual_seed(0)
    lm = tiny_llama(tokenizer, hidden_size=16, layers=2, heads=2, max_tokens=64).eval()
    batch = source("abcde", {"messages": [USER, ANSWER]}, {"prompt": "a", "response": "bc"}).batch([0, 1, 2])
    labels = torch.full_like(batch.ids, -100)
    labels[:, 1:][batch.response_mask] = batch.ids[:, 1:][batch.response_mask]
    expected = lm(input_ids=batch.ids, attention_mask=batch.attention_mask.long(), labels=labels).loss
    logprobs = Policy(lm, temperature=1.0)(batch.ids, batch.attention_mask, batch.response_width)[0]
    torch.testing.assert_close(-logprobs[batch.response_mask].mean(), expected, rtol=0, atol=1e-6)
