"""Token budgets of a run, and the protocol that halves a budget after an out-of-memory error.

Phases without collectives of DeepSpeed are repeated: a rank that runs out of memory reports it at the end of
the phase, and all ranks halve the budget, restore their random states and run the phase again. Other phases
cannot be repeated, because the other ranks wait in a collective: the rank records half of the budget in the
run directory and ends the run, which the same command resumes. A budget is halved only once.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from ppo_ds.distributed.memory import is_broken_group, is_out_of_memory
from ppo_ds.distributed.world import World
from ppo_ds.engine.rng import rng_snapshot
from ppo_ds.errors import RunError, single_line

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

ADVICE = {  # budget -> remedies besides a lower budget
    "rollout_tokens": "actor.zero.offload_states=always, or fewer sampling.max_new_tokens",
    "score_tokens": "reference.zero.offload_params=true, memory.sequence_parallel (stage=ppo), or "
    "shorter rows",
    "train_tokens": "gradient_checkpointing=true, a higher zero.stage of the trained models, or "
    "memory.sequence_parallel (stage=ppo)",
}


@dataclass
class TokenBudget:
    """Limit of the tokens of a forward on one rank, ``int(budget)``; an out-of-memory error may halve it."""

    name: str  # of the key in the section memory
    tokens: int
    # the number before an out-of-memory error, in this launch of the run or an earlier one
    halved_from: int | None = None

    def __int__(self) -> int:
        return self.tokens

    @property
    def can_halve(self) -> bool:
        return self.halved_from is None and self.tokens > 1

    def halve(self) -> None:
        """Halves the budget. May be called once."""
        assert self.can_halve
        self.tokens, self.halved_from = self.tokens // 2, self.tokens


NO_FAILURE, OUT_OF_MEMORY, FAILED = range(3)  # in increasing order of precedence
Refuse = Callable[[BaseException | None], BaseException]
OnChange = Callable[[Mapping[str, int]], None]


class PeerFailed(Exception):
    """Raised inside a phase if a collective cannot run because another rank has failed."""

    def __init__(self, failure: int):
        self.failure = failure


@dataclass(kw_only=True)
class TokenBudgets:
    """The token budgets of a run."""

    rollout: TokenBudget
    score: TokenBudget
    train: TokenBudget
    world: World
    # records a budget that was halved, in the run directory; called on one rank
    record: Callable[[TokenBudget], None]
    # receives the new numbers by name on every rank, after each change
    on_change: OnChange
    _in_phase: bool = field(init=False, default=False)

    def numbers(self) -> dict[str, int]:
        return {budget.name: budget.tokens for budget in (self.rollout, self.score, self.train)}

    def set(self, numbers: Mapping[str, int]) -> None:
        for budget in (self.rollout, self.score, self.train):
            if budget.name in numbers:
                budget.tokens = numbers[budget.name]
        self.on_change(self.numbers())

    def guard(
        self,
        budget: TokenBudget,
        run: Callable[P, T],
        *,
        what: str,
        repeatable: bool,
        discard: Callable[[T], None] = lambda result: None,
        economize: Callable[[], str | None] = lambda: None,
        refuse: Refuse | None = None,
    ) -> Callable[P, T]:
        """Wraps a phase that uses ``budget``: if memory runs out, the phase is repeated or the run ends.

        ``what`` describes the phase in messages. A phase is ``repeatable`` if its only collectives are those
        at its beginning, before any memory is allocated, and those that ``guard_collective`` wraps. If only
        other ranks fail in it, ``discard`` receives this rank's unused result. ``economize`` is called before
        a budget is halved. It makes later calls of the phase need less memory with this budget and returns
        the changed setting, or None if it cannot. A repeatable phase halves the budget only if the result is
        None. If a rank has another error than out-of-memory in a repeatable phase, each rank calls ``refuse``
        with its own error (or None) and raises the exception that ``refuse`` returns.
        """

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            if repeatable:
                phase = partial(run, *args, **kwargs)
                return self._run_repeatable(budget, what, phase, discard, economize, refuse)
            with self.ending(budget, what, economize):
                return run(*args, **kwargs)

        return guarded

    def guard_collective(
        self, collective: Callable[Concatenate[Any, P], T]
    ) -> Callable[Concatenate[Any, P], T]:
        """Wraps a collective that may run inside a repeatable phase, such as those that rewards call.

        First, the ranks exchange whether one of them has failed, since a failed rank would never reach the
        collective. A later error, when World copies ``value`` to the device, is not covered.
        """

        def guarded(value: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            if self._in_phase and (failure := self._any_failed(NO_FAILURE)):
                raise PeerFailed(failure)
            return collective(value, *args, **kwargs)

        return guarded

    def _run_repeatable(
        self,
        budget: TokenBudget,
        what: str,
        run: Callable[[], T],
        discard: Callable[[T], None],
        economize: Callable[[], str | None],
        refuse: Refuse | None,
    ) -> T:
        """Runs a phase; if a rank runs out of memory, repeats the phase with less memory.

        All ranks must call this. Either all ranks ``economize``, or all halve the budget.
        """
        while True:
            restore_rng = rng_snapshot(self.world)
            results, error, other, mine, agreed = list[T](), None, None, NO_FAILURE, NO_FAILURE
            self._in_phase = True
            try:
                results.append(run())
            except PeerFailed as peer:
                agreed = peer.failure
            except (Exception, SystemExit) as own:
                if is_out_of_memory(own) and not is_broken_group(own):
                    # only the text is kept: the frames of the traceback hold the tensors of the phase
                    error, mine = single_line(str(own)), OUT_OF_MEMORY
                elif refuse is None:
                    raise
                else:
                    other, mine = own, FAILED
            finally:
                self._in_phase = False
            if error is not None:
                free_memory(self.world)  # the exchange of the failure needs memory on the device
            failure = agreed or self._any_failed(mine)
            if failure == NO_FAILURE:
                return results[0]
            if results:
                discard(results.pop())
            if failure == FAILED:
                assert refuse is not None
                raise refuse(other) from other
            before, lowered = "", economize()
            if lowered is None:
                if not budget.can_halve:
                    raise self._exhausted(budget, what, error)
                before, lowered = f" with memory.{budget.name}={budget.tokens}", str(budget.tokens // 2)
                budget.halve()
                if self.world.is_main:
                    self.record(budget)
                self.on_change(self.numbers())
            if self.world.is_main:
                again = f"it is repeated with {lowered}, which the run keeps"
                log.warning("warning: out of memory in %s%s: %s", what, before, again)
            free_memory(self.world)
            restore_rng()

    def _any_failed(self, failure: int) -> int:
        """Returns the failure with the highest precedence on any rank. All ranks must call this."""
        return self.world.max_int(failure)

    @contextmanager
    def ending(
        self, budget: TokenBudget, what: str, economize: Callable[[], str | None] = lambda: None
    ) -> Iterator[None]:
        """Ends the run if memory runs out inside the block of this context manager. Not a collective.

        Records half of the budget for the next launch. The error also names the setting from ``economize``.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            setting = economize()
            if not budget.can_halve:
                raise self._exhausted(budget, what, single_line(str(error)), setting) from None
            less = "" if setting is None else f", and {setting} needs less memory"
            before = budget.tokens
            budget.halve()
            self.record(budget)
            raise RunError(
                f"rank {self.world.rank} is out of memory in {what} with memory.{budget.name}={before}: the "
                f"same command resumes with memory.{budget.name}={budget.tokens}{less} "
                f"({single_line(str(error))})"
            ) from None

    def _exhausted(
        self, budget: TokenBudget, what: str, error: str | None, setting: str | None = None
    ) -> RunError:
        advice = ADVICE[budget.name] if setting is None else f"{setting}, or {ADVICE[budget.name]}"
        before = f", which was halved from {budget.halved_from} before" if budget.halved_from else ""
        return RunError(
            f"out of memory in {what} with memory.{budget.name}={budget.tokens}{before}: set a lower "
            f"memory.{budget.name}, or use {advice} ({error or 'on another rank'})"
        )


def free_memory(world: World) -> None:
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
