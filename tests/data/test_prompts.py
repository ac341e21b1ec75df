import json

import pyarrow
import pyarrow.parquet
import pytest
import torch

from ppo_ds.data.prompts import PromptSource, PromptStream, eval_batches
from ppo_ds.errors import UserError
from tests.data.conftest import options_of

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}


def ids_of(prompts):
    """Returns each row's attended ids."""
    return [ids[mask].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]


def texts(prompts):
    return [row["prompt_text"] for row in prompts.metadata]


def letters(n):
    return [chr(ord("a") + i) * (1 + i % 3) for i in range(n)]


def test_left_padding(source):
    # ids 0 and 1 are <eos> and <pad>; characters follow from "!" (33) on: "a" is 97 - 33 + 2 = 66
    prompts = source("abc", "a", "bb").batch([0, 1, 2, 1])
    assert prompts.ids.tolist() == [[66, 67, 68], [1, 1, 66], [1, 67, 67], [1, 1, 66]]
    assert prompts.mask.tolist() == [
        [True, True, True],
        [False, False, True],
        [False, True, True],
        [False, False, True],
    ]
    assert prompts.ids.dtype == torch.int64 and prompts.mask.dtype == torch.bool


def test_pad_is_eos_and_inner_end_tokens_stay_attended(source, byte_tokenizer):
    tokenizer = byte_tokenizer(pad=None)
    prompts = source("<eos>a<eos>", "b", tokenizer=tokenizer).batch([0, 1])
    assert prompts.ids.tolist() == [[0, 66, 0], [0, 0, 67]]
    assert prompts.mask.tolist() == [[True, True, True], [False, False, True]]


def test_metadata_is_the_raw_row_and_the_prompt(source):
    row = {"prompt": "a", "answer": {"n": 1}, "prompt_text": "mine", "messages": [USER, ANSWER]}
    made = source(row)
    assert made.batch([0]).metadata == (
        {"data_source": made.path, "prompt": "a", "answer": {"n": 1}, "prompt_text": "a"},
    )


def test_a_row_keeps_its_own_data_source(source):
    assert (
        source({"prompt": "a", "data_source": "openai/gsm8k"}).batch([0]).metadata[0]["data_source"]
        == "openai/gsm8k"
    )


UNUSUAL = {
    "nested": {"a": {"b": [1, 2.5, None]}, "c": "\u00e9\n"},
    "tests": [{"in": "1 2", "out": "3"}, {"in": "", "out": None}],
    "empty": [],
    "nothing": None,
    "flag": False,
    "number": 0.1,
    "large": 2**53 + 1,
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_unusual_columns_reach_the_reward_unchanged(tmp_path, tokenizer, kind):
    """Two prompts with three samples each give p1, p1, p1, p2, p2, p2, each with its whole row."""
    rows = [
        {"prompt": "a", **UNUSUAL},
        {"prompt": "b", **UNUSUAL, "tests": None, "number": None, "nothing": None},
    ]
    if kind == "jsonl":
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    made = PromptSource(
        str(tmp_path / f"x.{kind}"),
        **options_of(tokenizer=tokenizer, max_new_tokens=9, apply_chat_template=False),
    )
    for rank in range(2):
        (batch,) = [
            next(
                PromptStream(
                    made, prompts_per_step=2, samples_per_prompt=3, rank=rank, world_size=2, shuffle=False
                )
            )
        ]
        expected = [dict(rows[rank], prompt_text="ab"[rank], data_source=made.path)] * 3
        assert [{name: row[name] for name in expected[0]} for row in batch.metadata] == expected
        assert all(set(row) == set(expected[0]) for row in batch.metadata)


def test_chat(source, tokenizer):
    prompts = source({"messages": [USER, ANSWER], "answer": 3}).batch([0])
    (row,) = prompts.metadata
    assert (row["messages"], row["answer"], row["prompt_text"]) == ([USER], 3, "<user>hi<eos><assistant>")
    ids = ids_of(prompts)[0]
    assert (
        ids == tokenizer.encode_many([tokenizer.render_chat([USER])], special_tokens=False)[0]
        and ids.count(0) == 1
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>hi<eos><assistant>"


def test_a_text_is_a_user_message_if_there_is_a_chat_template(source, byte_tokenizer):
    made = source("hi", apply_chat_template=None).batch([0]).metadata[0]
    assert made["messages"] == [USER] and made["prompt_text"] == "<user>hi<eos><assistant>"
    assert (
        source("hi", apply_chat_template=None, tokenizer=byte_tokenizer(template=None))
        .batch([0])
        .metadata[0]["prompt_text"]
        == "hi"
    )


def test_only_texts_get_the_tokenizers_own_special_tokens(source, byte_tokenizer):
    template = "{{ eos_token }}{{ messages[0]['content'] }}"
    made = source(
        "a",
        {"messages": [{"role": "user", "content": "b"}]},
        tokenizer=byte_tokenizer(template=template, adds_bos=True),
    )
    assert ids_of(made.batch([0, 1])) == [[0, 66], [0, 67]]


def test_texts_and_chats_in_one_file(source):
    rows = [
        {"prompt": "a"},
        {"messages": [USER]},
        {"prompt": "b"},
        {"conversations": [{"from": "human", "value": "c"}]},
    ]
    assert texts(source(*rows).batch(range(4))) == [
        "a",
        "<user>hi<eos><assistant>",
        "b",
        "<user>c<eos><assistant>",
    ]


def test_more_rows_than_a_chunk_stay_in_order(source, tokenizer):
    rows = [
        {"prompt": f"{i}"} if i % 3 else {"prompt": [{"role": "user", "content": f"{i}"}]}
        for i in range(2500)
    ]
    made = source(*rows)
    for i in (0, 1, 999, 1000, 1001, 2001, 2499):
        text = f"<user>{i}<eos><assistant>" if i % 3 == 0 else f"{i}"
        batch = made.batch([i])
        assert tokenizer.decode(ids_of(batch)[0], skip_special_tokens=False) == text == texts(batch)[0]


def test_truncation_keeps_the_end(source, tokenizer):
    made = source(
        "abcde",
        {"messages": [{"role": "user", "content": "x" * 50}]},
        "ok",
        max_prompt_tokens=len("<assistant>") + 3,
    )
    assert made.report == {
        "rows": 3,
        "truncated": 1,
        "dropped": 0,
        "lowered": 0,
        "repeated": 0,
        "same_id": 0,
        "unknown": 0,
    }
    prompts = made.batch([0, 1])
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in ids_of(prompts)] == [
        "abcde",
        "xx<eos><assistant>",
    ]
    assert texts(prompts)[1] == "<user>" + "x" * 50 + "<eos><assistant>"


def test_drop(source):
    made = source("abc", "abcd", "ab", "abcde", max_prompt_tokens=3, long_prompts="drop")
    assert (
        made.report
        == {"rows": 4, "truncated": 0, "dropped": 2, "lowered": 0, "repeated": 0, "same_id": 0, "unknown": 0}
        and len(made) == 2
    )
    assert [(row["n"], row["prompt_text"]) for row in made.batch([1, 0]).metadata] == [(2, "ab"), (0, "abc")]


def test_dropping_everything_is_an_error(source):
    with pytest.raises(
        UserError, match="all 2 prompts are dropped: they have more than data.max_prompt_tokens=1 tokens"
    ):
        source("ab", "cd", max_prompt_tokens=1, long_prompts="drop")


@pytest.mark.parametrize(
    "text", ["naïve 中文 \U0001f600 e\u0301 \u200f", "\x00\x01\t\r\n\x7f\u2028\u0085", "word " * 20_000]
)
def test_texts_survive(source, tokenizer, text):
    prompts = source(text, "a", max_prompt_tokens=200_000).batch([1, 0])
    assert tokenizer.decode(ids_of(prompts)[1]) == text == prompts.metadata[1]["prompt_text"]
    assert prompts.ids.shape[1] == len(text.encode())


def test_chats_need_a_template(source, byte_tokenizer):
    with pytest.raises(UserError, match=r"data.jsonl:2: a chat, but .* data.chat_template"):
        source("text", {"messages": [USER]}, tokenizer=byte_tokenizer(template=None))


def test_a_system_message(source, byte_tokenizer):
    rows = [
        "hi",
        {"messages": [USER, ANSWER, USER]},
        {"messages": [{"role": "system", "content": "own"}, USER]},
    ]
    made = source(*rows, system="be brief", apply_chat_template=None)
    batch = made.batch([0, 1, 2])
    assert texts(batch) == [
        "<system>be brief<eos><user>hi<eos><assistant>",
        "<system>be brief<eos><user>hi<eos><assistant>yo<eos><user>hi<eos><assistant>",
        "<system>own<eos><user>hi<eos><assistant>",
    ]
    # reward models read the messages
    assert batch.metadata[0]["messages"] == [{"role": "system", "content": "be brief"}, USER]
    assert (
        ids_of(batch)[0]
        == byte_tokenizer().encode_many(
            [byte_tokenizer().render_chat(batch.metadata[0]["messages"])], special_tokens=False
        )[0]
    )


def test_a_system_message_needs_a_template_that_takes_it(source, byte_tokenizer):
    with pytest.raises(
        UserError,
        match="data.system='be brief': the tokenizer has no chat template for it; set data.chat_template, or",
    ):
        source("hi", system="be brief", tokenizer=byte_tokenizer(template=None))
    with pytest.raises(
        UserError,
        match=r"data.jsonl:1: column \"prompt\" is used as a bare text, .* data.apply_chat_template=false",
    ):
        source("hi", system="be brief", apply_chat_template=False)
    picky = byte_tokenizer(
        template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    )
    with pytest.raises(
        UserError,
        match=(
            r"data.jsonl:1: the chat template refuses a chat with the roles system, user "
            r"\(TemplateError: no system\)"
        ),
    ):
        source({"messages": [USER]}, system="be brief", tokenizer=picky)


def test_a_prompt_without_tokens(source, byte_tokenizer):
    with pytest.raises(UserError, match=r"data.jsonl:1: a text has no tokens"):
        source({"messages": [USER]}, tokenizer=byte_tokenizer(template="{{ '' }}"))


def test_each_response_has_the_limit_of_its_row_or_of_the_run(source):
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "max_new_tokens": 3},
        {"prompt": "c", "max_new_tokens": None},
        {"prompt": "d", "max_new_tokens": 7},
    ]
    made = source(
        *rows,
        {"prompt": "e", "max_new_tokens": 8.0},
        {"prompt": "f", "max_new_tokens": 9e9},
        max_new_tokens=7,
    )
    prompts = made.batch([5, 4, 3, 2, 1, 1, 0])
    assert prompts.limits.tolist() == [7, 7, 7, 7, 3, 3, 7] and prompts.limits.dtype == torch.int64
    assert made.report["lowered"] == 2 and prompts.metadata[4]["max_new_tokens"] == 3


def test_limits_stay_with_their_prompts_if_others_are_dropped(source):
    rows = [
        {"prompt": "abc", "max_new_tokens": 20},
        {"prompt": "a", "max_new_tokens": 2},
        {"prompt": "abc"},
        {"prompt": "b", "max_new_tokens": 4},
    ]
    made = source(*rows, max_prompt_tokens=2, long_prompts="drop")
    assert made.batch([0, 1]).limits.tolist() == [2, 4] and made.report["dropped"] == 2


def test_limits_of_a_csv_file_are_text(tmp_path, tokenizer):
    (tmp_path / "x.csv").write_text("prompt,max_new_tokens\na,3\nb,\nc,5.0\n")
    made = PromptSource(str(tmp_path / "x.csv"), **options_of(tokenizer=tokenizer, max_new_tokens=6))
    assert made.batch([0, 1, 2]).limits.tolist() == [3, 6, 5]


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True, [3], "nan", "inf", 10**400])
def test_an_invalid_limit(source, value):
    with pytest.raises(
        UserError, match=r'data.jsonl:2: column "max_new_tokens" must be a whole number of at least 1, not '
    ):
        source("a", {"prompt": "b", "max_new_tokens": value})


def test_prompt_column_and_max_samples(source):
    made = source({"q": "a", "prompt": "no"}, {"q": "b"}, {"prompt": None}, prompt_column="q", max_samples=2)
    assert texts(made.batch([0, 1])) == ["a", "b"]


# ---- the stream


def take(stream, steps):
    return [texts(next(stream)) for _ in range(steps)]


def test_an_epoch_has_every_prompt_once_and_the_next_has_another_order(source):
    made = source(*letters(10))
    stream = PromptStream(made, prompts_per_step=5, seed=3)
    first, second = sum(take(stream, 2), []), sum(take(stream, 2), [])
    assert sorted(first) == sorted(second) == sorted(letters(10))
    assert first != second and first != letters(10)
    again = PromptStream(made, prompts_per_step=5, seed=3)
    assert sum(take(again, 4), []) == first + second
    assert sum(take(PromptStream(made, prompts_per_step=5, seed=4), 2), []) != first


def test_prompts_that_do_not_fill_a_step_begin_the_next(source):
    stream = PromptStream(source("a", "b", "c", "d", "e"), prompts_per_step=3, shuffle=False)
    assert take(stream, 3) == [["a", "b", "c"], ["d", "e", "a"], ["b", "c", "d"]]
    assert stream.epoch == pytest.approx(9 / 5)
    shuffled = PromptStream(source("a", "b", "c", "d", "e"), prompts_per_step=3)
    seen = sum(take(shuffled, 5), [])
    assert all(sorted(seen[i : i + 5]) == list("abcde") for i in (0, 5, 10))


def test_samples_of_a_prompt_are_adjacent(source):
    stream = PromptStream(source("a", "b", "c"), prompts_per_step=2, samples_per_prompt=3, shuffle=False)
    assert take(stream, 2) == [list("aaabbb"), list("cccaaa")]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("samples", [1, 2])
def test_concatenated_ranks_equal_the_single_rank(source, world_size, samples):
    made = source(*letters(13))
    options = {"prompts_per_step": 8, "samples_per_prompt": samples, "seed": 5}
    alone = PromptStream(made, **options)
    ranks = [PromptStream(made, rank=r, world_size=world_size, **options) for r in range(world_size)]
    for _ in range(6):
        whole, slices = next(alone), [next(rank) for rank in ranks]
        assert {len(s) for s in slices} == {8 * samples // world_size}
        assert sum((ids_of(s) for s in slices), []) == ids_of(whole)
        assert sum((list(s.metadata) for s in slices), []) == list(whole.metadata)


def test_resume_with_another_number_of_ranks(source):
    made = source(*letters(7))
    before = [PromptStream(made, prompts_per_step=4, rank=r, world_size=2) for r in range(2)]
    for stream in before:
        take(stream, 5)
    assert before[0].state_dict() == before[1].state_dict() == {"step": 5}
    after = PromptStream(made, prompts_per_step=4)
    after.load_state_dict(before[0].state_dict())
    assert take(after, 3) == [a + b for a, b in zip(take(before[0], 3), take(before[1], 3), strict=True)]


def test_rows_that_cannot_be_split(source):
    with pytest.raises(UserError, match="rollout.prompts_per_step=3 .* 4 ranks"):
        PromptStream(source("a", "b", "c"), prompts_per_step=3, samples_per_prompt=2, rank=0, world_size=4)


# ---- evaluation


@pytest.mark.parametrize(
    ("n", "world_size", "rows", "limit"),
    [(7, 1, 3, None), (7, 2, 3, None), (7, 4, 1, None), (2, 4, 8, None), (9, 3, 2, 5)],
)
def test_evaluation_counts_every_prompt_once_with_equal_batches_on_all_ranks(
    source, n, world_size, rows, limit
):
    made = source(*letters(n))
    ranks = [
        eval_batches(made, rank=r, world_size=world_size, rows_per_batch=rows, max_prompts=limit)
        for r in range(world_size)
    ]
    shapes = [[len(prompts) for prompts, _ in batches] for batches in ranks]
    assert all(shape == shapes[0] for shape in shapes) and max(shapes[0]) <= rows
    counted = [
        text
        for batches in ranks
        for prompts, weights in batches
        for text, w in zip(texts(prompts), weights.tolist(), strict=True)
        if w == 1
    ]
    assert counted == letters(n)[:limit]
    assert {w for batches in ranks for _, weights in batches for w in weights.tolist()} <= {0.0, 1.0}
