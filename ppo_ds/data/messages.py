"""Parses raw rows into prompts (a text, or a chat up to the assistant's answer) and response length limits.

A chat is a list of ``{"role", "content"}``, or of ``{"from", "value"}`` as in ShareGPT. A final answer in the
row is removed, because the policy generates an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppo_ds.config.sections.data import DataConfig
from ppo_ds.config.text import show
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import CHARACTERS, Message, Tokenizer
from ppo_ds.types import Row

LIMIT_COLUMN = "max_new_tokens"
CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", *CHAT_COLUMNS)  # the first existing column is used
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
class PromptFormat:
    """Describes where the prompts of a data set are stored and how they are formatted."""

    column: str | None = None  # the prompt's column; None: the first of PROMPT_COLUMNS in the row
    column_key: str = "data.prompt_column"  # config key of ``column``, for error messages
    apply_chat_template: bool = False  # whether a text becomes a chat with a single user message
    system: str | None = None  # a system message for chats without one


def prompt_format(tokenizer: Tokenizer, data: DataConfig, key: str) -> PromptFormat:
    """Builds the format for a tokenizer; ``key`` is the config key of the data set's path."""
    if data.system is not None and not tokenizer.has_chat_template:
        raise UserError(
            f"data.system={data.system[:40]!r}: the tokenizer has no chat template for it; set "
            "data.chat_template, or write it into the prompts"
        )
    applies = tokenizer.has_chat_template if data.apply_chat_template is None else data.apply_chat_template
    return PromptFormat(data.prompt_column, f"{key.rpartition('.')[0]}.prompt_column", applies, data.system)


def parse_prompt(row: Row, format: PromptFormat) -> Prompt:
    """Returns the row's prompt. Errors omit the row's location, which the caller adds."""
    name, key = format.column, format.column_key
    if name is None:
        present = [column for column in PROMPT_COLUMNS if column in row]
        if not present:
            raise UserError(
                f"none of the columns {', '.join(PROMPT_COLUMNS)}; set {key} to one that the row has: "
                f"{column_names(row)}"
            )
        # in file formats with fixed columns, a missing value is null
        name = next((column for column in present if row[column] is not None), present[0])
    elif name not in row:
        raise UserError(f"{key}={name}: no such column; the row has: {column_names(row)}")
    value = row[name]
    if isinstance(value, str):
        if name in CHAT_COLUMNS and format.column is None:
            raise UserError(
                f'column "{name}" must be a list of messages, not a text (CSV has no lists: use JSONL or '
                f"Parquet, or set {key})"
            )
        text = check_text(value, f'column "{name}"')
        if format.apply_chat_template:
            return add_system_message([{"role": "user", "content": text}], format)
        if format.system is not None:
            raise UserError(
                f'column "{name}" is used as a bare text, which has no place for data.system; '
                "remove data.system or data.apply_chat_template=false"
            )
        return text
    if isinstance(value, list):
        refuse_tools(row)
        return add_system_message(remove_final_answer(parse_chat(value, name), name), format)
    raise UserError(f'column "{name}" must be a text or a list of messages, not {_type_name(value)}')


def refuse_tools(row: Row, model: str = "policy") -> None:
    """Raises UserError if the row lists tools, because prompts do not include tools."""
    if row.get("tools"):
        raise UserError(
            f'column "tools": tools are not shown to the {model}; write them into the system message and '
            "remove or rename the column"
        )


def add_system_message(messages: list[Message], format: PromptFormat) -> list[Message]:
    if format.system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": format.system}, *messages]


def parse_max_new_tokens(row: Row) -> int | None:
    """Returns the row's limit of response tokens, from its column "max_new_tokens", or None.

    The value may be a float (a Parquet column with gaps) or a text (CSV, where an empty cell means None).
    """
    value = row.get(LIMIT_COLUMN)
    if value is None or value == "":
        return None
    number = as_number(value)
    if not number >= 1 or number % 1 != 0:
        raise UserError(f'column "{LIMIT_COLUMN}" must be a whole number of at least 1, not {show(value)!r}')
    return int(number)


def as_number(value: Any) -> float:
    """Converts a number or numeric text to float; returns NaN for any other value."""
    try:
        return float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def parse_chat(messages: list, name: str) -> list[Message]:
    """Converts the messages of the column ``name`` to ``{"role", "content"}``."""
    return [_message(each, f'column "{name}", message {i}') for i, each in enumerate(messages, start=1)]


def remove_final_answer(messages: list[Message], name: str) -> list[Message]:
    n = len(messages)
    while n and messages[n - 1]["role"] == "assistant":
        n -= 1
    if not n:
        raise UserError(f'column "{name}": nothing to answer: no message before the assistant\'s')
    check_text(messages[n - 1]["content"], f'column "{name}", message {n}')
    return messages[:n]


def _message(value: object, location: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{location} must be an object with role and content, not {_type_name(value)}")
    if value.get("role") is not None:
        role, content = value["role"], value.get("content")
    elif value.get("from") is not None:
        role, content = SHAREGPT_ROLES.get(str(value["from"])), value.get("value")
        if role is None:
            raise UserError(
                f'{location}: "from" is {show(value["from"])!r}; known values are {", ".join(SHAREGPT_ROLES)}'
            )
    else:
        raise UserError(
            f"{location} has neither role and content nor from and value, but: {column_names(value)}"
        )
    if not isinstance(role, str):
        raise UserError(f"{location}: the role must be a text, not {_type_name(role)}")
    if value.get("tool_calls"):
        raise UserError(f"{location}: tool_calls are not shown to the policy; write them into the content")
    if not isinstance(content, str):
        raise UserError(f"{location}: the content must be a text, not {_type_name(content)}")
    # empty contents are allowed: they are common in system messages
    return {"role": _check_unicode(role, location), "content": _check_unicode(content, location)}


def check_text(value: str, location: str) -> str:
    """Returns the text; raises UserError if it is empty or not valid Unicode."""
    if not value.strip():
        problem = "only white space" if value else "empty"
        raise UserError(f"{location} is {problem}: fill it in or remove the row")
    return _check_unicode(value, location)


def _check_unicode(value: str, location: str) -> str:
    r"""Returns the text; raises UserError for a lone surrogate ("\ud800"), or if the text is too long."""
    if len(value) > CHARACTERS:
        raise UserError(f"{location} has more than {CHARACTERS} characters; shorten it or remove the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{location} is not valid Unicode: a lone surrogate at character {error.start + 1}"
        ) from error
    return value


def column_names(row: dict[str, object]) -> str:
    return show(", ".join(map(str, row))) or "none"


def _type_name(value: object) -> str:
    return "null" if value is None else type(value).__name__
