"""Reads the tool calls in a turn of the policy, in the format that the chat template uses.

The format is found by rendering a call with the template, not by the name of the model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_ds.background.values import quoted
from ppo_ds.environments.feedback import encode_chat
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer

PYTHON_TAG = "<|python_tag|>"
THOUGHT_END = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the policy."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why the call cannot be parsed; "" if it can


CallReader = Callable[[str], list[ToolCall]]  # argument: a turn with special tokens, without the end token

_EXAMPLE = ToolCall("example_tool", {"text": "two words", "count": 2})


def read_hermes(text: str) -> list[ToolCall]:
    """Reads calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen writes them."""
    after_thought = text.rpartition(THOUGHT_END)[2]
    blocks = re.findall(r"<tool_call>(.*?)(</tool_call>|\Z)", after_thought, re.DOTALL)
    return [
        call if end else ToolCall("", {}, "the call does not end with </tool_call>")
        for body, end in blocks
        for call in _read_objects(body, "arguments")
    ]


def read_llama(text: str) -> list[ToolCall]:
    """Reads calls ``{"name": ..., "parameters": {...}}``, separated by ``;``, as Llama 3 writes them."""
    body = text.rpartition(THOUGHT_END)[2].strip()
    is_call = body.startswith(("{", PYTHON_TAG))
    return _read_objects(body.removeprefix(PYTHON_TAG), "parameters") if is_call else []


def _read_objects(text: str, key: str) -> list[ToolCall]:
    """Reads JSON objects with a name and, at ``key``, arguments; invalid ones become calls with a problem."""
    calls: list[ToolCall] = []
    rest = text.strip()
    while rest or not calls:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", {}, f"the call is not valid JSON: {error}")]
        rest = rest[end:].strip().removeprefix(";").strip()
        is_call = isinstance(value, dict) and isinstance(value.get("name"), str)
        arguments = value.get(key, {} if len(value) == 1 else None) if is_call else None
        if isinstance(arguments, dict):
            calls.append(ToolCall(value["name"], arguments))
        else:
            problem = f'a call is a JSON object with a text "name" and an object "{key}"'
            calls.append(ToolCall("", {}, problem))
    return calls


def find_reader(tokenizer: Tokenizer, names: Sequence[str], key: str) -> CallReader:
    """Returns the function that reads calls in the format of the tokenizer's chat template.

    Raises UserError if the template does not show the tools ``names``, writes calls in an unknown format, or
    does not support results of tools. ``key`` is the config key for the errors.
    """
    question: Any = {"role": "user", "content": "A question."}
    call = {"type": "function", "function": {"name": _EXAMPLE.name, "arguments": _EXAMPLE.arguments}}
    answer: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = tokenizer.render_chat([question])
    if hidden := [name for name in names if name not in before]:
        raise UserError(
            f"{key}: the chat template does not show the tools ({', '.join(hidden)}) to the policy; set "
            "data.chat_template to one that does"
        )
    after = tokenizer.render_chat([question, answer], to_answer=False)
    written = after[len(os.path.commonprefix([before, after])) :]
    stops = [tokenizer.decode([id], skip_special_tokens=False) for id in tokenizer.stop_ids]
    for stop in filter(None, stops):
        written = written.partition(stop)[0]
    reader = next((read for read in (read_hermes, read_llama) if read(written) == [_EXAMPLE]), None)
    if reader is None:
        raise UserError(
            f"{key}: the chat template writes a call of a tool as {quoted(written)}, which is a form that "
            'cannot be read; set data.chat_template to one that writes <tool_call>{"name": ..., "arguments": '
            '{...}}</tool_call> or {"name": ..., "parameters": {...}}'
        )
    encode_chat(tokenizer, ({"role": "tool", "content": "A result."},), tokenizer.pad_id)
    return reader
