"""Interface of environments, which answer the turns of the policy, and the import of a user's class.

The class is called once per response, with the arguments in the config, so each response has its own object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ppo_ds.background.user_code import load_object
from ppo_ds.background.values import described, is_float32, quoted
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message
from ppo_ds.types import Row

KEY = "rollout.environment"
METHODS = {"reset": ("row",), "step": ("answer",)}  # with tools, step is called with (answer, calls)


class Environment(Protocol):
    """Answers each turn that the policy takes in one response.

    Plain methods run in a pool of threads, async methods in an event loop; each object has one call at a
    time. An error or a time-out ends the response. If the class has an attribute ``tools``, the prompt shows
    these tools, and step also gets the tool calls of a turn: see environments/tools.py.
    """

    def reset(self, row: Row) -> list[Message] | None:
        """Begins an episode; returns the messages of the prompt, or None to keep the prompt of the data.

        ``row`` is a copy of the row of the data, with the same keys as for a reward function. All responses
        to one prompt should begin with the same messages.
        """

    def step(self, answer: str) -> tuple[str | list[Message] | None, float, bool]:
        """Receives one turn of the policy as text; returns (feedback, reward, whether the episode is done).

        The feedback is a text, which becomes a user message, or a list of messages: dicts with the texts role
        and content. Feedback is ignored if the episode is done.
        """


@dataclass(frozen=True)
class Step:
    """A validated result of ``Environment.step``."""

    feedback: tuple[Message, ...]  # empty if the episode is done
    reward: float
    done: bool


class InvalidResult(ValueError):
    """Raised if an environment returns a result that violates its interface."""


def load_environment(path: str, arguments: Mapping[str, Any]) -> partial[Environment]:
    """Imports a class and returns a function that makes an environment with ``arguments``.

    Raises UserError if the class cannot be imported, lacks a method, or does not accept the arguments.
    """
    kind = load_object(path, f"{KEY}.path", "class")
    if not isinstance(kind, type):
        raise UserError(f"{KEY}.path={path}: {described(kind)} is not a class; give one with reset and step")
    methods = METHODS | ({"step": ("answer", "calls")} if hasattr(kind, "tools") else {})
    for name, parameters in methods.items():
        method, takes = getattr(kind, name, None), ", ".join(parameters)
        if not callable(method):
            raise UserError(f"{KEY}.path={path}: the class has no method {name}({takes}); add it")
        try:
            inspect.signature(method).bind(None, *parameters)
        except TypeError as error:
            raise UserError(
                f"{KEY}.path={path}: {name} is called with ({takes}), but takes "
                f"{inspect.signature(method)}: {error}"
            ) from None
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise UserError(f"{KEY}.arguments: {error}; {path} takes {inspect.signature(kind)}") from None
    return partial(kind, **arguments)


def is_asynchronous(kind: Callable[..., Any]) -> bool:
    """Returns whether ``reset`` or ``step`` of an environment's class is async."""
    return any(inspect.iscoroutinefunction(getattr(kind, name)) for name in METHODS)


def read_messages(value: Any) -> tuple[Message, ...]:
    """Validates and returns messages: a list of dicts of texts with role and content. Raises InvalidResult.

    The list must not be empty. All texts must be valid Unicode, since no tokenizer accepts a lone surrogate.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise InvalidResult(f"returned {described(value)}, which is not a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise InvalidResult(
                f"returned {described(message)} as a message; it must have the texts role and content"
            )
        for key, text in message.items():
            if not isinstance(text, str):
                raise InvalidResult(
                    f"returned {described(text)} as the {key} of a message; remove it, or write it as a text"
                )
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidResult(
                    f"returned {quoted(text)} as the {key} of a message, which is not valid Unicode: a lone "
                    f"surrogate at character {error.start + 1}"
                ) from error
    return tuple(dict(message) for message in value)


def read_step(value: Any) -> Step:
    """Converts the result of ``Environment.step`` to a Step; raises InvalidResult if it is not valid."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise InvalidResult(f"returned {described(value)}, which is not (feedback, reward, done)")
    feedback, reward, done = value
    if not is_float32(reward):
        raise InvalidResult(f"returned the reward {described(reward)}, which is not a finite number")
    if not isinstance(done, bool):
        raise InvalidResult(f"returned done = {described(done)}, which is neither True nor False")
    if done:
        return Step((), float(reward), done)
    if not feedback:
        raise InvalidResult("returned no feedback although the episode is not done")
    if isinstance(feedback, str):
        feedback = [{"role": "user", "content": feedback}]
    return Step(read_messages(feedback), float(reward), done)
