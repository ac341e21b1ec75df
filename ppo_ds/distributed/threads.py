"""How many threads a rank computes with on its CPU: its share of the machine's cores, worked out here and not left to a launcher.

torchrun sets OMP_NUM_THREADS=1 for its ranks where nobody has set it, ``deepspeed`` sets nothing (each rank then takes every core) or, with
``--bind_cores_to_rank``, gives each rank cores of its own. A user's OMP_NUM_THREADS is a bound; run.threads is the key.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cores:
    """What one process may compute on."""

    machine: str
    usable: frozenset[int]  # numbers of the cores that it may run on
    quota: float  # how many of them at once (a container's limit); inf: all


@dataclass(frozen=True)
class Threads:
    """What this rank computes with."""

    each: int  # threads of this rank
    cores: int  # that the ranks on its machine may use together
    ranks: int  # on its machine

    def __str__(self) -> str:
        return f"{self.each} per rank ({self.cores} core{'s' * (self.cores > 1)}, {self.ranks} rank{'s' * (self.ranks > 1)} on this machine)"


def own_cores() -> Cores:
    """Of this process."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Cores(platform.node(), frozenset(usable), cpu_quota(CGROUP))


def cpu_quota(cgroup: Path) -> float:
    """Cores' worth of time that the container of this process gets; inf without a limit. cgroup v2 and v1 keep it in different files."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
        except OSError:  # of the other version, or no cgroup at all
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def users_bound(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, but not torchrun's 1, which says nothing of what anybody wants."""
    given = environment.get("OMP_NUM_THREADS", "")
    if not given.isdigit() or int(given) < 1 or ("TORCHELASTIC_RUN_ID" in environment and given == "1"):
        return None
    return int(given)


def share(rank: int, ranks: Sequence[Cores], asked: int | None, bound: int | None = None) -> Threads:
    """``asked``: run.threads. Without it each core counts as divided by the ranks that may run on it, and the sum is rounded down; 1 at least,
    ``bound`` at most."""
    mine = ranks[rank]
    here = [cores for cores in ranks if cores.machine == mine.machine]
    own = sum(1 / sum(core in cores.usable for cores in here) for core in mine.usable)
    together = len(frozenset().union(*(cores.usable for cores in here)))
    each = asked or max(1, math.floor(min(own, mine.quota / len(here), bound or math.inf) + 1e-9))
    return Threads(each, math.ceil(min(together, mine.quota)), len(here))
