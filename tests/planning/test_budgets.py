"""Tests the arithmetic of token budgets that are auto, and the budgets that a resume takes over."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ppo_ds.assemble.evaluation import guarded_scoring
from ppo_ds.background.pending import Pending
from ppo_ds.config.schema import Config
from ppo_ds.engine.memory_budget import GIB, LAZY, LIBRARIES, cpu_memory, host_memory, tensor_memory
from ppo_ds.planning.budgets import (
    CPU_LIMITS,
    RECORD,
    automatic,
    known_budgets,
    largest,
    resolve,
    write_record,
)
from ppo_ds.planning.run_memory import CONTEXT, Estimate, Hardware
from ppo_ds.planning.vllm_memory import VllmMemory
from ppo_ds.run.token_budgets import TokenBudget
from tests.config.commands import MINIMAL, compose
from tests.ppo.conftest import run_ranks
from tests.support.budgets import fixed_budgets

RESIDENT = 10**6


def estimated(config: Config, offloads_above: int = 10**9) -> Estimate:
    """Estimates 10, 100 and 1000 bytes per token for generation, scoring and training."""
    memory = config.memory
    phases = {
        "generate": RESIDENT + 10 * memory.rollout_tokens,
        "values": RESIDENT + 90 * memory.score_tokens,
        "ref_logprobs": RESIDENT + 100 * memory.score_tokens,
        "update_actor": RESIDENT + 1000 * memory.train_tokens,
    }
    plan = "offloaded" if memory.rollout_tokens > offloads_above else "as trained"
    return Estimate({"actor": RESIDENT}, phases, 0, {}, plan, row_tokens=1000, rows=100)


def numbers(
    *arguments: str, room: int, on_gpu: bool = True, estimate: Callable[[Config], Estimate] = estimated
) -> dict[str, int]:
    return resolve(compose(*MINIMAL, *arguments), estimate, RESIDENT + room, on_gpu).numbers


def test_budgets_fill_the_memory_up_to_their_limits() -> None:
    # 5000 bytes for 1000 each: 4 steps of 1024; 50,000 for 100 each: 48 steps; 100 rows of 1000 tokens
    assert numbers(room=5 * 10**6) == {
        "rollout_tokens": 100_000,
        "score_tokens": 48 * 1024,
        "train_tokens": 4 * 1024,
    }
    assert numbers(room=10**12) == {"rollout_tokens": 100_000, "score_tokens": 65536, "train_tokens": 32768}
    assert numbers(room=10**12, on_gpu=False) == CPU_LIMITS
    assert numbers(room=5 * 10**6, on_gpu=False) == CPU_LIMITS | {"train_tokens": 4096}
    # one row, if nothing fits
    assert numbers(room=-1) == dict.fromkeys(CPU_LIMITS, 1000)


def test_a_number_of_the_user_stays() -> None:
    found = numbers("memory.train_tokens=77", room=5 * 10**6)
    assert "train_tokens" not in found and found["score_tokens"] == 48 * 1024
    fixed = [f"memory.{name}=9" for name in CPU_LIMITS]
    assert resolve(compose(*MINIMAL, *fixed), estimated, 0, True).lines == []
    assert automatic(compose(*MINIMAL, "memory.score_tokens=9")) == ["rollout_tokens", "train_tokens"]


def test_a_larger_batch_does_not_offload_states() -> None:
    def offloading(config: Config) -> Estimate:
        return estimated(config, offloads_above=50_000)

    assert numbers(room=10**12, estimate=offloading)["rollout_tokens"] == 48 * 1024


def test_the_banner_shows_the_arithmetic() -> None:
    lines = resolve(compose(*MINIMAL), estimated, 3 * GIB, True).lines
    assert lines[0] == (
        "memory     3.0 GiB per rank for a phase: 3.0 GiB usable - 1.0 MiB of weights, optimizer states and "
        "gradient buffers"
    )
    assert lines[1:] == [
        "memory     rollout_tokens=100000: generate takes 1.0 MiB; a larger number is not faster",
        "memory     score_tokens=65536: ref_logprobs takes 6.2 MiB; a larger number is not faster",
        "memory     train_tokens=32768: update_actor takes 31.2 MiB; a larger number is not faster",
    ]
    *_, line = resolve(compose(*MINIMAL), estimated, RESIDENT + 5 * 10**6, True).lines
    assert line == (
        "memory     train_tokens=4096: update_actor takes 3.9 MiB, 1 KiB per token beyond one row"
    )
    *_, line = resolve(compose(*MINIMAL), estimated, 0, True).lines
    assert line.endswith("takes 1.0 MiB; this is one row, and by the estimate it does not fit")


def test_the_banner_counts_the_memory_of_vllm() -> None:
    def engine(config: Config) -> Estimate:
        return replace(estimated(config), vllm=VllmMemory(1, 1, 1, 1))

    line = resolve(compose(*MINIMAL, "rollout.backend=vllm"), engine, 3 * GIB, True).lines[0]
    assert line.endswith(" of weights, optimizer states, gradient buffers and vLLM")


def test_the_banner_names_the_states_that_generation_offloads() -> None:
    def offloading(config: Config, above: int = 0) -> Estimate:
        found = estimated(config, above)
        if found.generation != "offloaded":
            return found
        phases = found.phases | {"generate": found.phases["generate"] - 900_000}
        return replace(found, phases=phases, moved=900_000)

    first, generation, *others = resolve(compose(*MINIMAL), offloading, 3 * GIB, True).lines
    assert generation == (
        "memory     rollout_tokens=100000: generate takes 1.0 MiB after offloading 0.9 MiB; a larger number "
        "is not faster"
    )
    assert not any("offloading" in line for line in others)
    # 400,000 bytes: 100,000 of states stay, and 10 bytes per token
    _, generation, *_ = resolve(compose(*MINIMAL), offloading, 400_000, True).lines
    assert "rollout_tokens=29696: generate takes 0.3 MiB after offloading 0.9 MiB, 0 KiB per" in generation
    for usable in (0, 400_000, RESIDENT, 2 * RESIDENT, GIB):
        for above in (0, 5000, 30_000, 10**9):
            lines = resolve(compose(*MINIMAL), partial(offloading, above=above), usable, True).lines
            assert not any(" -" in line for line in lines[1:]), lines


def test_the_largest_number_is_found_by_bisection() -> None:
    for exact in (1, 1023, 1024, 5000, 10_239, 10_240, 99_999):
        expected = exact // 1024 * 1024 or 30
        assert largest(100_000, 30, lambda tokens, exact=exact: tokens <= exact) == expected
    assert largest(100_000, 30, lambda tokens: True) == 100_000


# -- memory of the machine


def test_memory_of_a_container_and_of_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=1))
    assert host_memory(tmp_path) == 64 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == 64 * GIB
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    assert host_memory(tmp_path) == 8 * GIB
    monkeypatch.setattr("ppo_ds.engine.memory_budget.host_memory", lambda: 8 * GIB)
    assert cpu_memory(2) == 4 * GIB - LIBRARIES and cpu_memory(8) == 0


def test_tensors_may_take_what_is_free_on_the_rank_with_the_least_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, found in (("mem_get_info", (20 * GIB, 80 * GIB)), ("memory_reserved", 12 * GIB)):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    other_rank = 25 * GIB
    world = SimpleNamespace(device=torch.device("cuda", 0), max_int=lambda n: max(n, -other_rank))
    # 20 GiB are free, and 2 of the reserved ones; 10 are allocated, and more will be until 30 are resident
    assert tensor_memory(world, 30 * GIB) == 25 * GIB
    world.max_int = lambda n: n
    assert tensor_memory(world, 30 * GIB) == 32 * GIB - LAZY
    # tensors that are not in the estimate take 4 GiB
    assert tensor_memory(world, 6 * GIB) == 28 * GIB - LAZY
    measured = Hardware.measured(8, 32 * GIB)
    assert measured.usable == int(32 * GIB * 0.95) and measured.gpu_memory > 32 * GIB + CONTEXT


# -- resume


def test_a_resume_takes_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    saved = {"rollout_tokens": 5000, "score_tokens": 4000, "train_tokens": 3000, "layout": "auto"}
    found, halved, lines = known_budgets(compose(*MINIMAL, "memory.train_tokens=9"), tmp_path, saved, 2)
    assert found == {"rollout_tokens": 5000, "score_tokens": 4000} and not halved
    assert lines == [
        "memory     rollout_tokens=5000: from the checkpoint",
        "memory     score_tokens=4000: from the checkpoint",
    ]
    # without a checkpoint of this number of ranks, or from a version that had no such key
    for nothing in (None, {}, {"train_tokens": "auto"}):
        assert known_budgets(compose(*MINIMAL), tmp_path, nothing, 2) == ({}, {}, [])


def test_a_record_of_too_little_memory_overrides_the_checkpoint(tmp_path: Path) -> None:
    write_record(tmp_path, TokenBudget("train_tokens", 4096, halved_from=8192), ranks=2)
    write_record(tmp_path, TokenBudget("score_tokens", 50, halved_from=100), ranks=2)
    for arguments, checkpoint, expected in (
        ((), {"train_tokens": 8192}, 4096),
        ((), {"train_tokens": 4096}, 4096),
        ((), None, 4096),
        (("memory.train_tokens=8192",), None, 4096),  # the command that ran out of memory
        (("memory.train_tokens=6000",), {"train_tokens": 8192}, None),  # the user's own number
        ((), {"train_tokens": 2048}, 2048),  # of another run's checkpoint
    ):
        found, halved, lines = known_budgets(compose(*MINIMAL, *arguments), tmp_path, checkpoint, 2)
        assert found.get("train_tokens") == expected
        assert halved.get("train_tokens") == (8192 if expected == 4096 else None)
        assert any("an earlier start ran out of memory with 8192" in line for line in lines) == (
            expected == 4096
        )
    assert known_budgets(compose(*MINIMAL), tmp_path, None, 4) == ({}, {}, [])  # other ranks
    (tmp_path / RECORD).write_text("{")
    assert known_budgets(compose(*MINIMAL), tmp_path, None, 2) == ({}, {}, [])
    (tmp_path / RECORD).write_text(json.dumps({"train_tokens": {"before": "x"}}))
    assert known_budgets(compose(*MINIMAL), tmp_path, None, 2) == ({}, {}, [])


def test_scores_in_the_background_are_cancelled_before_the_reward_is_repeated() -> None:
    """Otherwise both the first and the second requests of a paid judge would be answered."""

    def work(world: Any) -> list[str]:
        events: list[str] = []

        def start(rollout: Any) -> Pending[Any]:
            events.append("started")
            if world.rank == 1 and len(events) == 1:
                raise torch.OutOfMemoryError
            return Pending(lambda: None, (Future(),), lambda: events.append("cancelled"))

        context: Any = SimpleNamespace(world=world, budgets=fixed_budgets(world))
        models: Any = SimpleNamespace(reward_models=SimpleNamespace(sharded=False))
        guarded_scoring(context, models, start)(None)
        return events

    assert run_ranks(2, work) == [["started", "cancelled", "started"], ["started", "started"]]
