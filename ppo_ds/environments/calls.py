"""Calls of a user's environment in the background, and one trial call before models are loaded."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ppo_ds.background.pool import Pool, call_user, result_within, start_coroutine, torch_rng_snapshot
from ppo_ds.background.user_code import TRIAL_RESPONSE
from ppo_ds.background.values import NoResult
from ppo_ds.environments.base import (
    KEY,
    Environment,
    InvalidResult,
    Step,
    load_environment,
    read_messages,
    read_step,
)
from ppo_ds.environments.feedback import encode_chat, encode_prompt
from ppo_ds.environments.tool_calls import ToolCall
from ppo_ds.environments.tools import equip
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.rollout.keys import EnvironmentConfig
from ppo_ds.types import Row


@dataclass
class CallPool:
    """Runs the calls of environments, at most ``workers`` at a time and each with a time limit."""

    workers: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        self._pool = Pool(self.workers)

    def start(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        """Starts a call; the future's result is that of the call, or the exception that the call raised."""

        async def attempt() -> Any:
            try:
                return await result_within(self.timeout_seconds, start_coroutine(call(), "environments"))
            except Exception as error:
                return error

        (task,) = self._pool.start([attempt]).tasks
        return task


async def begin(make: Callable[[], Environment], row: Row) -> tuple[Environment, tuple[Message, ...] | None]:
    """Makes and resets an environment; returns it and its prompt's messages (None: the data's prompt)."""
    environment = await call_user(make)
    messages = await call_user(environment.reset, deepcopy(row))
    return environment, None if messages is None else read_messages(messages)


async def take_step(environment: Environment, answer: str, *calls: list[ToolCall]) -> Step:
    return read_step(await call_user(environment.step, answer, *calls))


def describe_error(error: BaseException) -> str:
    """Describes the error of a call on one line, with the location at which it was raised."""
    if isinstance(error, (InvalidResult, NoResult, UserError)):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(traceback.format_exception_only(error)[0].split())
    return f"raised {message} at {place.filename}:{place.lineno}"


def try_environment(
    settings: EnvironmentConfig, row: Row, tokenizer: Tokenizer, max_prompt_tokens: int
) -> None:
    """Runs one turn on ``row`` with a trial answer; raises UserError for an error or an invalid result.

    Also raises UserError if the tokens of the feedback cannot be found with the chat template.
    """
    path = str(settings.path)
    make = load_environment(path, settings.arguments)
    tokenizer, read_calls = equip(tokenizer, make.func, path)
    restore_rng = torch_rng_snapshot()

    async def turn() -> tuple[bool, Step]:
        environment, messages = await begin(make, row)
        encode_prompt(tokenizer, messages, row, max_prompt_tokens, has_tools=read_calls is not None)
        calls = [] if read_calls is None else [read_calls(TRIAL_RESPONSE)]
        return messages is not None, await take_step(environment, TRIAL_RESPONSE, *calls)

    outcome = CallPool(1, settings.timeout_seconds).start(turn).result()
    restore_rng()
    if isinstance(outcome, UserError):
        raise outcome
    if isinstance(outcome, Exception):
        raise UserError(
            f"{KEY}.path={path}: {describe_error(outcome)}, in a call before the start with the answer "
            f"{TRIAL_RESPONSE!r}; correct the class, or skip this call with {KEY}.trial=false"
        )
    gives_prompt, step = outcome
    is_chat = "messages" in row or (gives_prompt and tokenizer.has_chat_template)
    if is_chat and not step.done:
        encode_chat(tokenizer, step.feedback, tokenizer.pad_id)
