"""Calls of a user's environment in a pool of threads, and one trial call before models are loaded."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ppo_ds.background.pending import Pending
from ppo_ds.background.pool import Call, CallCancelled, NoResult, Pool, start_thread, torch_rng_snapshot
from ppo_ds.background.user_code import TRIAL_RESPONSE
from ppo_ds.environments.base import (
    KEY,
    Environment,
    InvalidResult,
    Step,
    load_environment,
    read_reset,
    read_step,
)
from ppo_ds.environments.feedback import FeedbackEncoder
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Row

CallPool = Pool[Callable[[], Any], Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a call, or its error."""

    result: Any = None
    error: BaseException | None = None


def call_pool(workers: int, timeout_seconds: float) -> CallPool:
    """Makes a pool of threads that runs at most ``workers`` calls at a time, each with a time limit."""
    return Pool(lambda call, cancellation: Call(start_thread(call)), workers, timeout_seconds)


def start_calls(pool: CallPool, calls: Sequence[Callable[[], Any]]) -> Pending[list[Outcome]]:
    """Starts calls in the background; their outcomes have the same order.

    The state of torch's random generators is restored afterwards, so that an environment does not change what
    the run samples next.
    """
    restore_rng = torch_rng_snapshot()

    def attempt(call: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Outcome:
        try:
            return Outcome(run(call))
        except CallCancelled:
            raise
        except BaseException as error:  # also SystemExit
            return Outcome(error=error)

    tasks, cancel = pool.start(attempt, calls)

    def finish() -> list[Outcome]:
        restore_rng()
        return [task.result() for task in tasks]

    return Pending(finish, tasks, cancel)


def begin(make: Callable[[], Environment], row: Row) -> tuple[Environment, tuple[Message, ...] | None]:
    """Makes an environment and resets it; returns it with the messages of the prompt, if it gives any."""
    environment = make()
    return environment, read_reset(environment.reset(deepcopy(row)))


def take_step(environment: Environment, answer: str) -> Step:
    """Calls ``step`` and checks its result."""
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
    make, pool = load_environment(path, arguments), call_pool(1, timeout_seconds)

    def turn() -> tuple[bool, Step]:
        environment, messages = begin(make, row)
        return messages is not None, take_step(environment, TRIAL_RESPONSE)

    (outcome,) = start_calls(pool, [turn]).result()
    if outcome.error is not None:
        raise UserError(
            f"{KEY}.path={path}: {describe_error(outcome.error)}, in a call before the start with the answer "
            f"{TRIAL_RESPONSE!r}; correct the class, or skip this call with {KEY}.trial=false"
        )
    gives_prompt, step = outcome.result
    is_chat = "messages" in row or (gives_prompt and tokenizer.has_chat_template)
    if is_chat and not step.done:
        FeedbackEncoder(tokenizer).encode_chat(step.feedback, tokenizer.pad_id)
