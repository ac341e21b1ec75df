"""Calls of a user's environment in a pool of threads, and one trial call before models are loaded."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

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
from ppo_ds.rewards.function import TRIAL_RESPONSE, torch_rng_snapshot
from ppo_ds.rewards.pending import Pending
from ppo_ds.rewards.pool import NoResult, Pool, start_thread
from ppo_ds.types import Row

CallPool = Pool[Callable[[], Any], Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a call, or its error."""

    result: Any = None
    error: BaseException | None = None


def call_pool(workers: int, timeout_seconds: float) -> CallPool:
    """Makes a pool of threads that runs at most ``workers`` calls at a time, each with a time limit."""
    return Pool(partial(start_thread, operator.call), workers, timeout_seconds)


def start_calls(pool: CallPool, calls: Sequence[Callable[[], Any]]) -> Pending[list[Outcome]]:
    """Starts calls in the background; their outcomes have the same order.

    The state of torch's random generators is restored afterwards, so that an environment does not change what
    the run samples next.
    """
    restore_rng, cancelled = torch_rng_snapshot(), Event()

    def attempt(call: Callable[[], Any]) -> Outcome:
        try:
            return Outcome(pool.run(call, cancelled))
        except BaseException as error:  # also SystemExit
            if isinstance(error, CancelledError) and cancelled.is_set():
                raise  # an environment may raise CancelledError too, from a pool of its own
            return Outcome(error=error)

    tasks = tuple(pool.submit(attempt, call) for call in calls)

    def finish() -> list[Outcome]:
        restore_rng()
        return [task.result() for task in tasks]

    return Pending(finish, tasks, cancelled.set)


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
