"""Tests what ranks do when one of them runs out of memory in a phase."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from ppo_ds.errors import RunError
from ppo_ds.run.token_budgets import TokenBudgets
from tests.ppo.conftest import run_ranks
from tests.support.budgets import fixed_budgets


class Phase:
    """A phase that draws random numbers, runs out of memory in some of its runs, and ends with a sum."""

    def __init__(self, budgets: TokenBudgets, world: Any, fails: dict[int, set[int]]):
        """Initializes the phase; ``fails`` has the runs, by rank, in which memory is short, from 1 on."""
        self.budgets, self.world, self.fails = budgets, world, fails.get(world.rank, set())
        self.runs, self.sum = 0, budgets.guard_collective(world.sum)

    def __call__(self, value: float) -> tuple[int, float, float]:
        self.runs += 1
        drawn = value * self.world.rank  # threads share the generators of the process, so nothing is drawn
        if self.runs in self.fails:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return int(self.budgets.score), drawn, float(self.sum(torch.tensor(value)))


def run_phase(fails: dict[int, set[int]], size: int = 3) -> list[Any]:
    """Returns the result, number of runs and records of each rank."""

    def work(world: Any) -> Any:
        budgets, records = fixed_budgets(world, score_tokens=100), []
        budgets.record = lambda budget: records.append((budget.name, budget.halved_from, budget.tokens))
        phase = Phase(budgets, world, fails)
        try:
            result = budgets.guard(budgets.score, phase, what="scoring", repeatable=True)(1.0)
        except RunError as error:
            result = str(error)
        return result, phase.runs, records

    return run_ranks(size, work)


def test_without_an_error_the_phase_runs_once() -> None:
    assert run_phase({}) == [((100, float(rank), 3.0), 1, []) for rank in range(3)]


@pytest.mark.parametrize("failing", [{1: {1}}, {0: {1}, 2: {1}}, {0: {1}, 1: {1}, 2: {1}}])
def test_all_ranks_repeat_with_half_the_budget(failing: dict[int, set[int]]) -> None:
    """Ranks with enough memory learn of the failure in the sum at the end of the phase."""
    found = run_phase(failing)
    assert [result for result, *_ in found] == [(50, float(rank), 3.0) for rank in range(3)]
    assert [runs for _, runs, _ in found] == [2, 2, 2]
    assert [records for *_, records in found] == [[("score_tokens", 100, 50)], [], []]


def test_the_second_error_ends_the_run_on_all_ranks() -> None:
    found = run_phase({1: {1}, 2: {2}})
    for rank, (message, runs, _) in enumerate(found):
        cause = "Tried to allocate 2.00 GiB." if rank == 2 else "on another rank"
        assert message == (
            "out of memory in scoring with memory.score_tokens=50, which was halved from 100 before: set a "
            "lower memory.score_tokens, or use reference.zero.offload_params=true, memory.sequence_parallel "
            f"(stage=ppo), or shorter rows ({cause})"
        )
        assert runs == 2


def test_random_states_are_restored_before_a_repetition() -> None:
    drawn = []

    def work(world: Any) -> float:
        budgets = fixed_budgets(world)

        def phase() -> float:
            drawn.append(float(torch.rand(())))
            if len(drawn) == 1:
                raise torch.OutOfMemoryError
            return drawn[-1]

        return budgets.guard(budgets.rollout, phase, what="generation", repeatable=True)()

    assert run_ranks(1, work) == [drawn[0]] and len(drawn) == 2


@pytest.mark.parametrize("ends", [False, True])
def test_results_of_ranks_with_enough_memory_are_discarded(ends: bool) -> None:
    """A rank discards the result of a phase that is repeated or ends the run, and no other result."""

    def work(world: Any) -> tuple[list[Any], Any]:
        budgets, runs, discarded = fixed_budgets(world, score_tokens=1 if ends else 100), [], []

        def phase() -> tuple[int, int]:
            runs.append(None)
            if world.rank == 1 and len(runs) == 1:
                raise torch.OutOfMemoryError
            return world.rank, len(runs)

        guarded = budgets.guard(
            budgets.score, phase, what="scoring", repeatable=True, discard=discarded.append
        )
        try:
            return discarded, guarded()
        except RunError:
            return discarded, None

    last = [None] * 3 if ends else [(rank, 2) for rank in range(3)]
    assert run_ranks(3, work) == list(zip([[(0, 1)], [], [(2, 1)]], last, strict=True))


def test_tensors_of_a_failed_phase_are_freed_before_the_ranks_agree() -> None:
    """The exchange of the failure allocates memory on the device itself."""

    def work(world: Any) -> list[bool]:
        budgets, held, alive = fixed_budgets(world), [], []
        exchange = budgets._any_failed

        def phase() -> None:
            if held:
                return
            tensor = torch.zeros(10)
            held.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError

        def any_failed(failed: bool) -> bool:
            alive.append(held[0]() is not None)
            return exchange(failed)

        budgets._any_failed = any_failed
        gc.disable()  # a collection that happens to run must not free the tensor
        try:
            budgets.guard(budgets.score, phase, what="scoring", repeatable=True)()
        finally:
            gc.enable()
        return alive

    assert run_ranks(1, work) == [[False, False]]


def test_other_errors_pass() -> None:
    def work(world: Any) -> str:
        budgets = fixed_budgets(world)
        for repeatable in (True, False):

            def fail(repeatable: bool = repeatable) -> None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            with pytest.raises(RuntimeError, match="illegal memory access"):
                budgets.guard(budgets.train, fail, what="the update", repeatable=repeatable)()
        return f"{budgets.train.tokens} {budgets.train.halved_from}"

    assert run_ranks(1, work) == ["1000 None"]


def test_a_phase_that_cannot_be_repeated_ends_the_run_and_records_half_the_budget() -> None:
    def work(world: Any) -> list[Any]:
        budgets, said = fixed_budgets(world, train_tokens=100), []
        budgets.record = lambda budget: said.append((budget.name, budget.halved_from, budget.tokens))
        for _ in range(2):
            with pytest.raises(RunError) as failure, budgets.ending(budgets.train, "the update"):
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
            said.append(str(failure.value))
        return said

    first, second, third = run_ranks(1, work)[0]
    assert first == ("train_tokens", 100, 50)
    assert second == (
        "rank 0 is out of memory in the update with memory.train_tokens=100: the same command resumes with "
        "memory.train_tokens=50 (Tried to allocate 2.00 GiB.)"
    )
    assert third.startswith("out of memory in the update with memory.train_tokens=50, which was halved from")
    assert "gradient_checkpointing=true" in third


OF_LIBRARIES = [
    DistBackendError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),
]


@pytest.mark.parametrize("error", OF_LIBRARIES, ids=["NCCL", "cuBLAS", "vLLM"])
def test_libraries_that_allocate_by_themselves_run_out_of_memory(error: RuntimeError) -> None:
    """A phase in which NCCL fails is not repeated, because its process group cannot be used any more."""

    def work(world: Any) -> list[int]:
        budgets, runs = fixed_budgets(world, score_tokens=100, train_tokens=100), []

        def phase() -> None:
            runs.append(int(budgets.score))
            if len(runs) == 1:
                raise error

        with pytest.raises(RunError, match="out of memory in the update with memory.train_tokens=100: the"):
            with budgets.ending(budgets.train, "the update"):
                raise error
        with suppress(DistBackendError):
            budgets.guard(budgets.score, phase, what="scoring", repeatable=True)()
        return runs

    repeated = [] if isinstance(error, DistBackendError) else [50]
    assert run_ranks(1, work) == [[100, *repeated]]


def test_a_budget_of_one_token_is_not_halved() -> None:
    def work(world: Any) -> None:
        budgets = fixed_budgets(world, train_tokens=1)
        with pytest.raises(RunError, match="memory.train_tokens=1: set a lower"):
            with budgets.ending(budgets.train, "the update"):
                raise torch.OutOfMemoryError

    run_ranks(1, work)
