"""Tests the threads of a rank, its share of the machine's cores, and the detection of bf16 support."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ppo_ds.distributed.threads import Cores, Threads, computes_bf16, cpu_quota, own_cores, share, user_limit


def machine(ranks: int, cores: int, name: str = "a", quota: float = math.inf) -> list[Cores]:
    """Returns ranks that may all run on every core."""
    return [Cores(name, frozenset(range(cores)), quota)] * ranks


@pytest.mark.parametrize(
    ("ranks", "cores", "each"),
    [(1, 2, 2), (2, 2, 1), (3, 2, 1), (8, 96, 12), (3, 6, 2), (3, 8, 2), (7, 64, 9)],
)
def test_cores_are_divided_by_ranks_and_each_gets_at_least_one(ranks: int, cores: int, each: int) -> None:
    assert [share(rank, machine(ranks, cores), None) for rank in range(ranks)] == [
        Threads(each, cores, ranks)
    ] * ranks


def test_each_machine_counts_its_own_ranks() -> None:
    ranks = machine(2, 8, "a") + machine(1, 6, "b")
    assert [share(rank, ranks, None).each for rank in range(3)] == [4, 4, 6]
    assert share(2, ranks, None) == Threads(6, 6, 1)


def test_ranks_bound_to_cores_by_a_launcher_keep_those() -> None:
    bound = [Cores("a", frozenset(range(4)), math.inf), Cores("a", frozenset(range(4, 8)), math.inf)]
    assert [share(rank, bound, None) for rank in range(2)] == [Threads(4, 8, 2)] * 2
    # rank 0 has 1 + 1 + 1/2 + 1/2 cores, rank 1 has 1/2 + 1/2
    partly = [Cores("a", frozenset({0, 1, 2, 3}), math.inf), Cores("a", frozenset({2, 3}), math.inf)]
    assert [share(rank, partly, None).each for rank in range(2)] == [3, 1]


def test_a_containers_quota_is_divided_by_ranks() -> None:
    assert share(0, machine(2, 64, quota=8.0), None) == Threads(4, 8, 2)
    assert share(0, machine(2, 64, quota=1.5), None) == Threads(1, 2, 2)


def test_the_requested_number_wins() -> None:
    assert share(1, machine(2, 2), 5) == Threads(5, 2, 2)


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None),  # torchrun's default
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 2),
        ({"OMP_NUM_THREADS": "4,2"}, None),  # one number per nested level
    ],
)
def test_the_users_number_is_an_upper_bound(environment: dict[str, str], limit: int | None) -> None:
    assert user_limit(environment) == limit
    assert share(0, machine(1, 8), None, limit).each == (limit or 8)
    assert share(0, machine(1, 8), 6, limit).each == 6  # run.threads overrides the limit


def test_text_for_the_banner() -> None:
    assert str(Threads(1, 2, 2)) == "1 per rank (2 cores, 2 ranks on this machine)"
    assert str(Threads(1, 1, 1)) == "1 per rank (1 core, 1 rank on this machine)"
    assert str(Threads(2, 2, 1, "waits: x")) == "2 per rank (2 cores, 1 rank on this machine); waits: x"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({}, math.inf),
    ],
)
def test_quotas_in_the_kernels_formats(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_cores_of_this_process() -> None:
    assert own_cores().usable and own_cores().quota > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nbugs\t: spectre\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx2 f16c\nmodel name\t: with bf16\n", False),
        ("Features\t: fp asimd bf16 sve\n", True),
        ("Features\t: fp asimd\n", False),
        ("cpu\t: POWER9\n", None),
    ],
)
def test_bf16_instructions(text: str, expected: bool | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert computes_bf16(tmp_path / "cpuinfo") is expected
    assert computes_bf16(tmp_path / "none") is None
