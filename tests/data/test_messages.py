import pytest

from ppo_ds.data.messages import PromptFormat, parse_prompt
from ppo_ds.errors import UserError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": ""}


@pytest.mark.parametrize(
    ("row", "column", "prompt"),
    [
        ({"prompt": "a"}, None, "a"),
        ({"prompt": "a", "messages": [USER]}, None, "a"),
        ({"prompt": "a", "messages": [USER]}, "messages", [USER]),
        ({"question": "a", "prompt": "b"}, "question", "a"),
        ({"prompt": [USER, ANSWER]}, None, [USER]),
        ({"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]}, None, [SYSTEM, USER, ANSWER, USER]),
        ({"messages": [USER, ANSWER, ANSWER]}, None, [USER]),
        ({"messages": [USER, USER]}, None, [USER, USER]),
        ({"messages": [{**USER, "name": "Ann", "from": None}]}, None, [USER]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "yo"},
                ]
            },
            None,
            [{"role": "system", "content": "s"}, USER],
        ),
        (
            {"conversations": [{"from": "gpt", "value": "yo"}, {"from": "human", "value": "hi"}]},
            None,
            [ANSWER, USER],
        ),
        ({"conversations": [USER, ANSWER]}, None, [USER]),
        (
            {"messages": [USER, ANSWER, {"role": "tool", "content": "4"}]},
            None,
            [USER, ANSWER, {"role": "tool", "content": "4"}],
        ),
    ],
)
def test_parse_prompt(row, column, prompt):
    assert parse_prompt(row, PromptFormat(column)) == prompt


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"prompt": None}, None, 'column "prompt" must be a text or a list of messages, not null'),
        ({"prompt": 5}, None, 'column "prompt" must be a text or a list of messages, not int'),
        ({"prompt": ""}, None, 'column "prompt" is empty'),
        ({"prompt": " \t\u3000\n"}, None, 'column "prompt" is only white space'),
        ({"prompt": "a\ud800"}, None, "a lone surrogate at character 2"),
        (
            {"question": "a", "answer": "b"},
            None,
            "set data.prompt_column to one that the row has: question, answer",
        ),
        ({"question": "a"}, "query", "data.prompt_column=query: no such column; the row has: question"),
        ({"messages": []}, None, "nothing to answer"),
        ({"messages": [ANSWER]}, None, "nothing to answer"),
        (
            {"messages": [USER, {"role": "user", "content": ""}]},
            None,
            'column "messages", message 2 is empty',
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            None,
            "message 1: the content must be a text, not null",
        ),
        ({"messages": [{"role": "user"}]}, None, "message 1: the content must be a text, not null"),
        ({"messages": [{"role": 1, "content": "a"}]}, None, "message 1: the role must be a text, not int"),
        ({"messages": ["hi"]}, None, "message 1 must be an object with role and content, not str"),
        ({"messages": [{"text": "hi"}]}, None, "neither role and content nor from and value, but: text"),
        (
            {"conversations": [{"from": "alien", "value": "a"}]},
            None,
            "\"from\" is 'alien'; known values are human",
        ),
        ({"messages": [USER, {"role": "user", "content": "\udc00"}]}, None, "message 2 is not valid Unicode"),
    ],
)
def test_bad_rows(row, column, message):
    with pytest.raises(UserError) as caught:
        parse_prompt(row, PromptFormat(column))
    assert message in str(caught.value)


SYSTEM_PROMPT = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "hi"}, [SYSTEM_PROMPT, USER]),
        ({"prompt": [USER, ANSWER]}, [SYSTEM_PROMPT, USER]),
        ({"messages": [USER, ANSWER, USER]}, [SYSTEM_PROMPT, USER, ANSWER, USER]),
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),  # an empty system message is kept
        ({"messages": [USER, SYSTEM, USER]}, [USER, SYSTEM, USER]),
    ],
)
def test_a_system_message_for_chats_without_one(row, prompt):
    given = {name: list(value) if isinstance(value, list) else value for name, value in row.items()}
    assert parse_prompt(row, PromptFormat(apply_chat_template=True, system="be brief")) == prompt
    assert row == given


def test_a_bare_text_has_no_place_for_a_system_message():
    with pytest.raises(
        UserError,
        match=(
            'column "prompt" is used as a bare text, which has no place for data.system; '
            "remove data.system or"
        ),
    ):
        parse_prompt({"prompt": "hi"}, PromptFormat(system="be brief"))


def test_an_empty_system_message_is_one():
    """Some templates add a default system message unless there is one, even an empty one."""
    assert parse_prompt({"prompt": "hi"}, PromptFormat(apply_chat_template=True, system="")) == [SYSTEM, USER]


def test_the_key_of_the_column_is_that_of_the_set():
    for row, message in (
        ({"q": "a"}, r"data.mix\[1\].prompt_column=x: no such column"),
        ({}, r"set data.mix\[1\].prompt_column to one"),
    ):
        with pytest.raises(UserError, match=message):
            parse_prompt(row, PromptFormat("x" if row else None, "data.mix[1].prompt_column"))
