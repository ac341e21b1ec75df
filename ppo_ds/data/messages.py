"""What a row asks: a text, or a chat up to where the assistant answers; and how long the answer may be.

A chat is a list of ``{"role", "content"}``, or of ``{"from", "value"}`` as ShareGPT has it. Roles are those that the row gives, never guessed from
the position. A last answer that the row brings along is dropped: the policy is to give its own.
"""

from __future__ import annotations

from ppo_ds.errors import UserError
from ppo_ds.types import Row

LIMIT_COLUMN = "max_new_tokens"
PROMPT_COLUMNS = ("prompt", "messages", "conversations")  # the first that a row has
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

Prompt = str | list[dict[str, str]]


def prompt_of(row: Row, column: str | None = None, text_as_chat: bool = False) -> Prompt:
    """The row's prompt, from ``column`` or the first of PROMPT_COLUMNS. Errors do not know the row's place: the caller adds it.

    ``text_as_chat``: a text is what a user says, a chat of one message.
    """
    name = _column(row, column)
    value = row[name]
    if isinstance(value, str):
        text = _text(value, f'column "{name}"')
        return [{"role": "user", "content": text}] if text_as_chat else text
    if isinstance(value, list):
        return _chat(value, name)
    raise UserError(f'column "{name}" must be a text or a list of messages, not {_kind(value)}')


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
        raise UserError(f'column "{LIMIT_COLUMN}" must be a whole number of at least 1, not {value!r}')
    return int(number)


def _column(row: Row, column: str | None) -> str:
    if column is not None and column not in row:
        raise UserError(f"data.prompt_column={column}: no such column; the row has: {', '.join(row)}")
    name = column or next((c for c in PROMPT_COLUMNS if c in row), None)
    if name is None:
        raise UserError(f"none of the columns {', '.join(PROMPT_COLUMNS)}; set data.prompt_column to one that the row has: {', '.join(row)}")
    return name


def _chat(turns: list, name: str) -> list[dict[str, str]]:
    messages = [_message(turn, f'column "{name}", message {i}') for i, turn in enumerate(turns, start=1)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f'column "{name}": nothing to answer: no message before the assistant\'s')
    _text(messages[-1]["content"], f'column "{name}", message {len(messages)}')
    return messages


def _message(turn: object, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise UserError(f"{where} must be an object with role and content, not {_kind(turn)}")
    if turn.get("role") is not None:
        role, content = turn["role"], turn.get("content")
    elif turn.get("from") is not None:
        role, content = SHAREGPT_ROLES.get(str(turn["from"])), turn.get("value")
        if role is None:
            raise UserError(f'{where}: "from" is {turn["from"]!r}; known are {", ".join(SHAREGPT_ROLES)}')
    else:
        raise UserError(f"{where} has neither role and content nor from and value, but: {', '.join(turn)}")
    if not isinstance(role, str):
        raise UserError(f"{where}: the role must be a text, not {_kind(role)}")
    if not isinstance(content, str):
        raise UserError(f"{where}: the content must be a text, not {_kind(content)}")
    return {"role": role, "content": _encodable(content, where)}  # empty texts are usual in system messages


def _text(value: str, where: str) -> str:
    if not value:
        raise UserError(f"{where} is empty")
    return _encodable(value, where)


def _encodable(value: str, where: str) -> str:
    r"""JSON can hold half a surrogate pair ("\ud800"), which no tokenizer takes."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is not valid Unicode: half a surrogate pair at character {error.start + 1}") from error
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
