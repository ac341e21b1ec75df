"""Calls of a user's environment in a pool of threads, and one trial call before models are loaded."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from ppo_ds.background.pending import Pending
from ppo_ds.background.pool import Pool, result_within, start_thread, torch_rng_snapshot
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
from ppo_ds.environments.feedback import encode_chat
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Row


@dataclass
class CallPool:
    """Runs the calls of environments in threads, each with a time limit."""

    workers: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        self._pool = Pool(self.workers)

    def start(self, calls: Sequence[Callable[[], Any]]) -> Pending[list[Any]]:
        """Starts calls; the result of each, or its exception, is in the same order.

        Torch's random state is restored afterwards, so that no environment changes what the run samples.
        """
        restore_rng = torch_rng_snapshot()

        async def attempt(call: Callable[[], Any]) -> Any:
            try:
                return await result_within(self.timeout_seconds, start_thread(call))
            except Exception as error:
                return error

        def finish(outcomes: list[Any]) -> list[Any]:
            restore_rng()
            return outcomes

        return self._pool.start(partial(attempt, call) for call in calls).then(finish)


def begin(make: Callable[[], Environment], row: Row) -> tuple[Environment, tuple[Message, ...] | None]:
    """Makes an environment and resets it; returns it with the messages of the prompt, if it gives any."""
    environment = make()
    messages = environment.reset(deepcopy(row))
    return environment, None if messages is None else read_messages(messages)


def take_step(environment: Environment, answer: str) -> Step:
    return read_step(environment.step(answer))


def describe_error(error: BaseException) -> str:
    """Describes the error of a call on one line, with the place where it was raised."""
    if isinstance(error, (InvalidResult, NoResult, UserError)):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(traceback.format_exception_only(error)[0].split())
    return f"raised {message} at {place.filename}:{place.lineno}"


def try_environment(
    path: str, arguments: Mapping[str, Any], timeout_seconds: float, row: Row, tokenizer: Tokenizer
) -> None:
    """Runs one turn on ``row`` with a trial answer, and raises UserError if that would end every response.

    Also raises UserError if the tokens of the feedback cannot be found with the chat template.
    """
    make = load_environment(path, arguments)

    def turn() -> tuple[bool, Step]:
        environment, messages = begin(make, row)
        return messages is not None, take_step(environment, TRIAL_RESPONSE)

    (outcome,) = CallPool(1, timeout_seconds).start([turn]).result()
    if isinstance(outcome, Exception):
        raise UserError(
            f"{KEY}.path={path}: {describe_error(outcome)}, in a call before the start with the answer "
            f"{TRIAL_RESPONSE!r}; correct the class, or skip this call with {KEY}.trial=false"
        )
    gives_prompt, step = outcome
    is_chat = "messages" in row or (gives_prompt and tokenizer.has_chat_template)
    if is_chat and not step.done:
        encode_chat(tokenizer, step.feedback, tokenizer.pad_id)
