"""A base class of environments with tools, and the tools of a class: functions, methods or JSON schemas."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import ValidationError, validate_call

from ppo_ds.background.pool import call_user
from ppo_ds.background.values import described, quoted
from ppo_ds.environments.base import KEY
from ppo_ds.environments.tool_calls import CallReader, ToolCall, find_reader
from ppo_ds.errors import UserError, single_line
from ppo_ds.models.tokenizer import Message, Tokenizer, tool_schema
from ppo_ds.types import Row

Tool = Callable[..., Any] | dict[str, Any]


class ToolError(Exception):
    """Raised by a tool to report a mistake to the policy; other exceptions of a tool end the response."""


class ToolEnvironment:
    """Runs the tools that the policy calls. The episode ends at the first turn without calls.

    ``tools`` lists plain or async functions and methods. A JSON schema in the list describes the method
    with the schema's name. Results are texts, or are converted to JSON.
    """

    tools: ClassVar[Sequence[Tool]] = ()

    def reset(self, row: Row) -> list[Message] | None:
        """Uses the prompt of the data. A subclass may store data of the row."""

    def finish(self, answer: str) -> float:
        """Returns the reward of a turn without calls. It may be async."""
        return 0.0

    async def step(self, answer: str, calls: list[ToolCall]) -> tuple[list[Message] | None, float, bool]:
        if not calls:
            return None, await call_user(self.finish, answer), True
        return [await self.run(call) for call in calls], 0.0, False

    async def run(self, call: ToolCall) -> Message:
        """Runs one call; returns the message with its result or with a description of the mistake."""
        tools = {name_of(tool): tool for tool in self.tools}
        try:
            if call.problem:
                raise ToolError(call.problem)
            if call.name not in tools:
                raise ToolError(f"there is no tool {quoted(call.name)}; the tools are {', '.join(tools)}")
            function = tools[call.name]
            if isinstance(function, dict) or "self" in inspect.signature(function).parameters:
                function = getattr(self, call.name)
            result = await call_user(partial(validate_call(function), **call.arguments))
        except ToolError as error:
            result = f"error: {error}"
        except ValidationError as error:  # raised for the arguments
            first = error.errors()[0]
            result = f"error: {call.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"role": "tool", "name": call.name, "content": content}


def name_of(tool: Tool) -> str:
    return str(tool["function"]["name"]) if isinstance(tool, dict) else tool.__name__


def equip(tokenizer: Tokenizer, kind: Any, path: str) -> tuple[Tokenizer, CallReader | None]:
    """Returns a tokenizer that shows the tools of an environment's class, and the reader of their calls.

    Without tools, returns ``tokenizer`` itself and None. Raises UserError if the tools are invalid, or if the
    chat template does not support them.
    """
    if not hasattr(kind, "tools"):
        return tokenizer, None
    key, schemas = f"{KEY}.path={path}", {}
    if not isinstance(kind.tools, (list, tuple)) or not kind.tools:
        raise UserError(
            f"{key}: tools is {described(kind.tools)}; make it a list of functions and JSON schemas"
        )
    for tool in kind.tools:
        try:
            name = name_of(tool)
            schema = tool if isinstance(tool, dict) else tool_schema(tool)
        except Exception as error:  # type hints may raise any exception
            raise UserError(
                f"{key}: the tool {described(tool)}: {single_line(str(error))}; give a function with type "
                "hints and a docstring that describes its arguments, or a JSON schema"
            ) from error
        if name in schemas:
            raise UserError(f"{key}: two tools have the name {name}; rename one of them")
        if isinstance(tool, dict) and issubclass(kind, ToolEnvironment) and not hasattr(kind, name):
            raise UserError(f"{key}: the class has no method {name}, whose JSON schema is in tools; add it")
        schemas[name] = schema
    equipped = tokenizer.with_tools([*schemas.values()])
    return equipped, find_reader(equipped, [*schemas], key)
