"""A reward computed by a Python function: ``fn(prompts, responses, rows)`` returns one score per response.

The score is a number, or a list with one reward for each step of the response (steps.py).
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from ppo_ds.background.pending import Pending
from ppo_ds.background.pool import (
    Pool,
    as_plain_error,
    result_within,
    start_coroutine,
    start_thread,
    torch_rng_snapshot,
)
from ppo_ds.background.user_code import TRIAL_RESPONSE, is_async, where_defined, where_raised
from ppo_ds.background.values import NoResult, described, quoted
from ppo_ds.config.types import Count, Number, Positive
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import Responses, RewardError, SlowTextReward, StepReward, TextScores
from ppo_ds.rewards.processes import FunctionRaised, WorkerProcesses
from ppo_ds.rewards.steps import step_ends
from ppo_ds.rewards.user_function import (
    Arguments,
    InvalidScore,
    Score,
    call_function,
    load_function,
    read_scores,
)
from ppo_ds.types import Row

LISTED_KEYS = 20  # maximum number of row keys in an error message


@dataclass(eq=False)
class FunctionReward(SlowTextReward):
    """Scores responses with the function at ``path``, which is ``pkg.mod:fn`` or ``file.py:fn``.

    The function gets three lists of equal length, copies that it may modify: the prompts as the policy reads
    them, the decoded responses, and the rows of the data (docs/rewards.md). Without a pool, it is called once
    with all responses of the rank: a plain function at once in the main thread, an async function in the
    background. With a pool, it is called in the background, once per response, with lists of one element.

    After each call, the states of torch's random generators are restored, so that the function does not
    change later sampling. An exception raised by the function propagates unchanged, with a note on the first
    prompt. From a worker process, only the exception's traceback is available.

    Args:
        path: The function.
        pool: Where calls for single responses run: in threads, in worker processes, or not at all (none). The
            calls of an async function in the pool ``thread`` share one event loop.
        workers: Simultaneous calls on each rank; None: 4. Only with a pool.
        timeout_seconds: The time limit of a call; None: 60. Only with a pool.
        fallback_score: The score of a response whose call exceeds the limit or raises NoResult, or whose
            worker process dies; None: the run stops. Only with a pool.
        step_separator: The text that separates the steps of a response; \\n stands for a line break. Only
            used if the function returns step rewards.
        trial: Whether the function is called once with trial responses before models are loaded; see
            ``try_on``.
        tokenizer: The actor's tokenizer.
        key: The reward's section in the config, for error messages.
    """

    path: str
    pool: Literal["none", "thread", "process"] = "none"
    workers: Count | None = None
    timeout_seconds: Positive | None = None
    fallback_score: Number | None = None
    step_separator: str = r"\n\n"
    trial: bool = True
    _: KW_ONLY
    tokenizer: Tokenizer
    key: str = "reward"

    def __post_init__(self) -> None:
        key, limit = self.key, self.timeout_seconds or 60.0
        for name in ("workers", "timeout_seconds", "fallback_score"):
            if self.pool == "none" and (value := getattr(self, name)) is not None:
                raise UserError(
                    f"{key}.{name}={value:g}: needs a pool; set {key}.pool=process or {key}.pool=thread"
                )
        if not self.step_separator:
            raise UserError(f"{key}.step_separator is empty; give the text that separates steps")
        self._name = f"{key}.path={self.path}"
        self._function = load_function(self.path, f"{key}.path")
        self._separator = self.step_separator.replace("\\n", "\n")
        self._calls = Pool(self.workers or 4)
        self._limit = None if self.pool == "none" else limit
        self._processes = WorkerProcesses(self.path, limit) if self.pool == "process" else None

    def start_responses(self, responses: Responses) -> Pending[TextScores]:
        restore_rng = torch_rng_snapshot()
        whole = range(len(responses.texts))
        if self.pool == "none" and not is_async(self._function):
            try:
                with self._name_in_errors(responses, whole):
                    scores = call_function(self._function, _arguments(responses, whole))
            finally:
                restore_rng()
            return Pending.of(self._text_scores(responses, [*scores]))
        calls = [whole] if self.pool == "none" else [range(i, i + 1) for i in whole]

        def finish(parts: list[list[Score | None]]) -> TextScores:
            if self._processes is None:  # a call in another process cannot change the random state here
                restore_rng()
            return self._text_scores(responses, [score for part in parts for score in part])

        return self._calls.start(partial(self._call, responses, rows) for rows in calls).then(finish)

    def try_on(self, rows: Sequence[Row]) -> None:
        """Calls the function with trial responses to ``rows``; raises UserError if an error would end a run.

        The last response is empty, since a model may end a response at once. A pool is used as in training,
        and its processes then end. The random states of this process are restored. Does nothing if ``trial``
        is false.
        """
        if not self.trial:
            return
        texts = (*[TRIAL_RESPONSE] * len(rows), "")
        responses = Responses((*rows, rows[0]), texts, (True,) * len(texts))
        python, numpy = random.getstate(), np.random.get_state()
        try:
            self.start_responses(responses).result()
        except RewardError as error:
            where = where_defined(self._function)
            problem = f"{error} ({where})" if where else str(error)
        except FunctionRaised as error:
            problem = f"{self._name} raised {error.line} at {error.where}"
        except (Exception, SystemExit) as error:
            where = where_raised(error, self._function)
            line = " ".join(traceback.format_exception_only(error)[0].split())
            problem = f"{self._name} raised {line} at {where}"
        else:
            return
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            if self._processes is not None:
                self._processes.end()
        keys = ", ".join(list(dict.fromkeys(key for row in rows for key in row))[:LISTED_KEYS])
        raise UserError(
            f"{problem}, in a call before the start with the trial responses {TRIAL_RESPONSE!r} and '' (keys "
            f"of a row: {keys}); correct the function, or skip this call with {self.key}.trial=false"
        )

    async def _call(self, responses: Responses, rows: range) -> list[Score | None]:
        """Scores the responses with the indices ``rows`` in one call; None stands for the fallback score."""
        arguments = _arguments(responses, rows)
        with self._name_in_errors(responses, rows):
            try:
                if self._processes is not None:
                    return [*await self._processes.scores(arguments)]
                if is_async(self._function):
                    future = start_coroutine(_await_scores(self._function, arguments), "reward functions")
                else:
                    future = start_thread(call_function, self._function, arguments)
                return [*await result_within(self._limit, future)]
            except NoResult:
                if self.fallback_score is None:
                    raise
                return [None] * len(rows)

    @contextmanager
    def _name_in_errors(self, responses: Responses, rows: range) -> Iterator[None]:
        """Names the function and a response in errors; turns InvalidScore and NoResult into RewardError."""
        try:
            yield
        except InvalidScore as error:
            remedy = f"; {error.remedy}" if error.remedy else ""
            where = "" if error.row is None else f" for {self._where(responses, rows[error.row])}"
            raise RewardError(f"{self._name} {error}{where}{remedy}") from None
        except NoResult as error:
            or_wait = f", or raise {self.key}.timeout_seconds" if error.timed_out else ""
            raise RewardError(
                f"{self._name} {error} for {self._where(responses, rows[0])}; set {self.key}.fallback_score "
                f"to the score of such responses{or_wait}"
            ) from None
        except BaseException as error:  # also SystemExit
            error.add_note(
                f"in {self._name}, scoring {len(rows)} responses; row {rows[0]} has the prompt "
                f"{quoted(responses.rows[rows[0]]['prompt_text'])}"
            )
            raise

    def _text_scores(self, responses: Responses, scores: list[Score | None]) -> TextScores:
        """Converts the scores of all responses; raises RewardError if step rewards do not match the steps."""
        given = [(row, score) for row, score in enumerate(scores) if score is not None]
        for row, value in given:
            if isinstance(value, list) != isinstance(given[0][1], list):
                other = f"{'a list' if isinstance(given[0][1], list) else 'a number'} for row {given[0][0]}"
                raise RewardError(
                    f"{self._name} returned {described(value)} for {self._where(responses, row)}, but "
                    f"{other}; it must return one float for each response, or one list of floats for each"
                )
        total = torch.zeros(len(scores), dtype=torch.float32, device="cpu")
        steps: list[tuple[StepReward, ...]] = [()] * len(scores)
        for row, score in given:
            if not isinstance(score, list):
                total[row] = score
                continue
            ends = step_ends(responses.texts[row], self._separator)
            if len(ends) != len(score):
                raise RewardError(
                    f"{self._name} returned {len(score)} step rewards for a response of {len(ends)} steps "
                    f"({self._where(responses, row)}); the steps are the non-blank pieces between "
                    f"{self.key}.step_separator={self._separator!r}"
                )
            steps[row] = tuple(map(StepReward, ends, score))
        if self.fallback_score is None:
            return TextScores(total, tuple(steps))
        is_fallback = torch.tensor([score is None for score in scores])
        total[is_fallback] = self.fallback_score
        return TextScores(total, tuple(steps), {"fallback": is_fallback.float()})

    @staticmethod
    def _where(responses: Responses, row: int) -> str:
        return f"row {row}, prompt {quoted(responses.rows[row]['prompt_text'])}"


def _arguments(responses: Responses, rows: range) -> Arguments:
    """Copies the prompts, texts and rows of one call, which may modify them."""
    raw_rows = deepcopy([responses.rows[row] for row in rows])
    return [row["prompt_text"] for row in raw_rows], [responses.texts[row] for row in rows], raw_rows


async def _await_scores(function: Callable[..., Any], arguments: Arguments) -> list[Score]:
    count = len(arguments[0])  # before the call, since the function may modify the lists
    try:
        return read_scores(await function(*arguments), count)
    except SystemExit as error:
        raise as_plain_error(error) from error
