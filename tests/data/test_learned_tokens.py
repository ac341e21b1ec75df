"""Tests which tokens of chats are learned, with templates that mark them and templates that do not.

The byte-level tokenizer has one id per byte and <eos> 0, which ends each turn.
"""

import pytest

from ppo_ds.errors import UserError
from tests.data.conftest import TEMPLATE
from tests.data.test_demonstrations import ANSWER, USER, learned, source  # noqa: F401

CHAT = [USER, {**ANSWER, "content": "no"}, {**USER, "content": "ok"}, ANSWER]
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}\n"
)
# as the template of Qwen3: the reasoning of answers before the last question is dropped
THINKING = (
    "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# as the template of Qwen3: the last answer begins with an empty reasoning
EMPTY_REASONING = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and loop.last %}"
    "<think></think>{% endif %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def taught(source, tokenizer, learn, chat=CHAT, **options):  # noqa: F811
    """Returns the text of a chat with its learned parts in brackets, and the source."""
    made = source({"messages": chat}, learn=learn, tokenizer=tokenizer, **options)
    batch = made.batch([0])
    text, inside = "", False
    for token, flag in zip(batch.ids[0].tolist(), [False, *batch.response_mask[0].tolist()], strict=True):
        text += ("[" if flag else "]") * (flag != inside)
        text += tokenizer.decode([token], skip_special_tokens=False)
        inside = flag
    return text + "]" * inside, made


@pytest.mark.parametrize("template", [TEMPLATE, MARKED, MARKED_WITHOUT_END])
@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("answer", "<user>hi<eos><assistant>no<eos><user>ok<eos><assistant>[yo<eos>]"),
        ("assistant", "<user>hi<eos><assistant>[no<eos>]<user>ok<eos><assistant>[yo<eos>]"),
        ("all", "<[user>hi<eos><assistant>no<eos><user>ok<eos><assistant>yo<eos>]"),
    ],
)
def test_learned_turns_and_their_end_tokens(source, byte_tokenizer, template, learn, expected):  # noqa: F811
    text, made = taught(source, byte_tokenizer(template=template), learn)
    assert text.replace("\n", "") == expected
    assert made.marked == ("generation %}" in template and learn != "all")
    assert made.token_counts == (
        {"answer": 3, "assistant": 6, "all": len(made.batch([0]).ids[0]) - 1}[learn],
        len(made.batch([0]).ids[0]),
    )


@pytest.mark.parametrize(
    "template", [MARKED, MARKED.replace("{{ eos_token }}{% endg", "{{ eos_token }}\n{% endg")]
)
def test_the_marked_tokens_are_the_mask_of_transformers(source, byte_tokenizer, template):  # noqa: F811
    tokenizer = byte_tokenizer(template=template)
    batch = source({"messages": CHAT}, learn="assistant", tokenizer=tokenizer).batch([0])
    expected = tokenizer.hf.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert batch.ids[0].tolist() == expected["input_ids"]
    assert [0, *batch.response_mask[0].int().tolist()] == expected["assistant_masks"]


def test_messages_after_the_last_answer_are_left_out(source, byte_tokenizer):  # noqa: F811
    text, _ = taught(source, byte_tokenizer(), "assistant", chat=[*CHAT[:2], USER])
    assert text == "<user>hi<eos><assistant>[no<eos>]"
    with pytest.raises(UserError, match="data.jsonl:1: column .*the last message must be the assistant's"):
        taught(source, byte_tokenizer(), "answer", chat=[*CHAT[:2], USER])


def test_a_chat_that_begins_with_the_assistant(source, byte_tokenizer):  # noqa: F811
    text, _ = taught(source, byte_tokenizer(), "assistant", chat=CHAT[1:])
    assert text == "<assistant>no<eos><user>ok<eos><assistant>[yo<eos>]"


def test_a_template_that_drops_the_reasoning_of_earlier_turns(source, byte_tokenizer):  # noqa: F811
    tokenizer = byte_tokenizer(template=THINKING)
    chat = [USER, {**ANSWER, "content": "hm</think>no"}, USER, {**ANSWER, "content": "hm</think>yo"}]
    text, _ = taught(source, tokenizer, "answer", chat=chat)
    assert text == "<user>hi<eos><assistant>no<eos><user>hi<eos><assistant>[hm</think>yo<eos>]"
    with pytest.raises(
        UserError,
        match=r"data.jsonl:1: the chat template renders message 2 differently .*; set sft.learn=answer",
    ):
        taught(source, tokenizer, "assistant", chat=chat)
    assert "[no<eos>]" in taught(source, tokenizer, "assistant")[0]  # without reasoning nothing is dropped


def test_a_template_that_adds_an_empty_reasoning_to_the_last_answer(source, byte_tokenizer):  # noqa: F811
    tokenizer = byte_tokenizer(template=EMPTY_REASONING)
    assert taught(source, tokenizer, "assistant")[0] == (
        "<user>hi<eos><assistant>[no<eos>]<user>ok<eos><assistant>[<think></think>yo<eos>]"
    )
    alternating = EMPTY_REASONING.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if loop.previtem and loop.previtem['role'] == m['role'] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}",
    )
    with pytest.raises(UserError, match="data.jsonl:1: the chat template renders message 2 differently"):
        taught(source, byte_tokenizer(template=alternating), "assistant")


def test_a_template_that_marks_nothing_of_a_chat(source, byte_tokenizer):  # noqa: F811
    tokenizer = byte_tokenizer(template=MARKED.replace("'assistant' %}{% g", "'model' %}{% g"))
    with pytest.raises(UserError, match="data.jsonl:1: the chat template marks nothing of this chat"):
        taught(source, tokenizer, "assistant")


def test_a_template_with_marks_that_refuses_a_chat(source, byte_tokenizer):  # noqa: F811
    tokenizer = byte_tokenizer(template="{{ raise_exception('no') }}" + MARKED)
    with pytest.raises(UserError, match="data.jsonl:1: the chat template refuses a chat with the roles user"):
        taught(source, tokenizer, "assistant")


def test_prompts_and_texts(source, tokenizer):  # noqa: F811
    rows = [{"prompt": "ab", "response": "cd"}, {"text": "xy"}]
    for learn, expected in [
        ("answer", [("ab", "cd<eos>"), ("x", "y<eos>")]),
        ("assistant", [("ab", "cd<eos>"), ("x", "y<eos>")]),
        ("all", [("a", "bcd<eos>"), ("x", "y<eos>")]),
    ]:
        batch = source(*rows, learn=learn, apply_chat_template=False).batch([0, 1])
        assert learned(batch, tokenizer) == expected


def test_rows_without_a_learned_token_are_dropped_and_tokens_are_counted(source):  # noqa: F811
    """The first answer begins after 20 tokens."""
    chats = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    made = source(*chats, learn="assistant", max_tokens=21)
    assert made.report == {"rows": 2, "truncated": 2, "dropped": 0, "unknown": 0} and made.token_counts == (
        2,
        42,
    )
    with pytest.raises(UserError, match="all 2 rows are dropped"):
        source(*chats, learn="assistant", max_tokens=20)
    made = source(*chats, learn="answer", max_tokens=23)
    assert made.report == {"rows": 2, "truncated": 0, "dropped": 1, "unknown": 0} and made.location(
        0
    ).endswith(":2")


def test_columns_and_the_number_of_rows(source, tokenizer):  # noqa: F811
    rows = [{"question": "ab", "answer": "cd"}, {"question": "x", "answer": "y"}]
    made = source(*rows, prompt_column="question", max_samples=1, apply_chat_template=False)
    assert len(made) == 1 and learned(made.batch([0]), tokenizer) == [("ab", "cd<eos>")]


def test_prompts_for_generation(source, tokenizer):  # noqa: F811
    made = source({"text": "x"}, {"messages": CHAT}, {"prompt": "hi", "response": "yo"}, learn="assistant")
    prompts = made.prompts(5, 7)
    assert [row["answer"] for row in prompts.metadata] == ["yo", "yo"] and prompts.limits.tolist() == [7, 7]
    assert prompts.metadata[1]["prompt_text"] == "<user>hi<eos><assistant>"
    assert [message["role"] for message in prompts.metadata[0]["messages"]] == ["user", "assistant", "user"]
    assert tokenizer.decode(prompts.ids[0].tolist(), skip_special_tokens=False) == (
        "<user>hi<eos><assistant>no<eos><user>ok<eos><assistant>"
    )
    assert made.prompts(1, 7).ids.tolist() == [prompts.ids[0].tolist()]
    assert source("x", learn="all").prompts(5, 7) is None
