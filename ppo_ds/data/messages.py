"""What a row asks: a text, or a chat up to where the assistant answers; and how long the answer may be.

A chat is a list of ``{"role", "content"}``, or of ``{"from", "value"}`` as ShareGPT has it. Roles are those that the row gives, never guessed from
the position. A last answer that the row brings along is dropped: the policy is to give its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.config.typed import show
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Row

LIMIT_COLUMN = "max_new_tokens"
CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS)  # the first that a row has
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}

Prompt = str | list[Message]


@dataclass(frozen=True)
class Reading:
    """How a data set's rows are read. Errors do not know the row's place: the caller adds it."""

    column: str | None = None  # of the prompt; None: the first of PROMPT_COLUMNS that the row has
    column_key: str = "data.prompt_column"  # for errors
    text_as_chat: bool = False  # a text is what a user says, a chat of one message
    system: str | None = None  # a system message for chats that have none


def reading_for(
    tokenizer: Tokenizer, column: str | None, text_as_chat: bool | None, system: str | None, key: str
) -> Reading:
    """How the rows of a data set are read for this tokenizer; ``key``: the path's."""
    if system is not None and not tokenizer.has_chat_template:
        raise UserError(
            f"data.system={system[:40]!r}: the tokenizer has no chat template to put it in; set data.chat_template, or write it into the prompts"
        )
    as_chat = tokenizer.has_chat_template if text_as_chat is None else text_as_chat
    return Reading(column, f"{key.rpartition('.')[0]}.prompt_column", as_chat, system)


def prompt_of(row: Row, reading: Reading) -> Prompt:
    """The row's prompt."""
    name = _column(row, reading)
    value = row[name]
    if isinstance(value, str):
        if name in CHAT_COLUMNS and reading.column is None:
            raise UserError(
                f'column "{name}" must be a list of messages, not a text (CSV has no lists: use JSONL or Parquet, or set {reading.column_key})'
            )
        return spoken(text_of(value, f'column "{name}"'), name, reading)
    if isinstance(value, list):
        if row.get("tools"):
            raise UserError(
                'column "tools": tools are not shown to the policy; write them into the system message and remove or rename the column'
            )
        return with_system(asked(chat_of(value, name), name), reading)
    raise UserError(f'column "{name}" must be a text or a list of messages, not {_kind(value)}')


def spoken(text: str, name: str, reading: Reading) -> Prompt:
    """A text prompt of the column ``name``: as it is, or as a chat."""
    if reading.text_as_chat:
        return with_system([{"role": "user", "content": text}], reading)
    if reading.system is not None:
        raise UserError(
            f'column "{name}" is a text that stays as it is, without a place for data.system; leave out data.system or data.apply_chat_template=false'
        )
    return text


def with_system(messages: list[Message], reading: Reading) -> list[Message]:
    """The chat, after the reading's system message where it has none of its own."""
    if reading.system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": reading.system}, *messages]


def limit_of(row: Row) -> int | None:
    """The most tokens that the row wants its answer to have, from its column "max_new_tokens"; None where it does not say.

    Whole numbers come as floats from a Parquet column with gaps, and as text from CSV, where an empty cell says nothing.
    """
    value = row.get(LIMIT_COLUMN)
    if value is None or value == "":
        return None
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if number < 1 or number % 1 != 0:  # also what is no number
        raise UserError(f'column "{LIMIT_COLUMN}" must be a whole number of at least 1, not {show(value)!r}')
    return int(number)


def _column(row: Row, reading: Reading) -> str:
    column, key = reading.column, reading.column_key
    if column is not None and column not in row:
        raise UserError(f"{key}={column}: no such column; the row has: {names_of(row)}")
    there = [c for c in PROMPT_COLUMNS if c in row]
    if column is None and not there:
        raise UserError(
            f"none of the columns {', '.join(PROMPT_COLUMNS)}; set {key} to one that the row has: {names_of(row)}"
        )
    # a file format with columns has a null where a row has none
    return column or next((c for c in there if row[c] is not None), there[0])


def chat_of(turns: list, name: str) -> list[Message]:
    """The messages of the column ``name``, all of them, in one form."""
    return [_message(turn, f'column "{name}", message {i}') for i, turn in enumerate(turns, start=1)]


def asked(messages: list[Message], name: str) -> list[Message]:
    """The messages up to where the assistant answers."""
    n = len(messages)
    while n and messages[n - 1]["role"] == "assistant":
        n -= 1
    if not n:
        raise UserError(f'column "{name}": nothing to answer: no message before the assistant\'s')
    text_of(messages[n - 1]["content"], f'column "{name}", message {n}')
    return messages[:n]


def _message(turn: object, where: str) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with role and content, not {_kind(turn)}")
    if turn.get("role") is not None:
        role, content = turn["role"], turn.get("content")
    elif turn.get("from") is not None:
        role, content = SHAREGPT_ROLES.get(str(turn["from"])), turn.get("value")
        if role is None:
            raise UserError(
                f'{where}: "from" is {show(turn["from"])!r}; known are {", ".join(SHAREGPT_ROLES)}'
            )
    else:
        raise UserError(f"{where} has neither role and content nor from and value, but: {names_of(turn)}")
    if not isinstance(role, str):
        raise UserError(f"{where}: the role must be a text, not {_kind(role)}")
    if turn.get("tool_calls"):
        raise UserError(f"{where}: tool_calls are not shown to the policy; write them into the content")
    if not isinstance(content, str):
        raise UserError(f"{where}: the content must be a text, not {_kind(content)}")
    return {
        "role": _encodable(role, where),
        "content": _encodable(content, where),
    }  # empty texts are usual in system messages


def text_of(value: str, where: str) -> str:
    """The text itself, which must be one."""
    if not value.strip():
        raise UserError(
            f"{where} is {'nothing but white space' if value else 'empty'}: fill it in or remove the row"
        )
    return _encodable(value, where)


def _encodable(value: str, where: str) -> str:
    r"""JSON can hold half a surrogate pair ("\ud800"), which no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} is not valid Unicode: half a surrogate pair at character {error.start + 1}"
        ) from error
    return value


def names_of(row: dict[str, object]) -> str:
    """Of a row's columns, for errors."""
    return show(", ".join(map(str, row))) or "none"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
