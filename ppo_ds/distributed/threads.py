"""Number of CPU threads of each rank: its share of the machine's cores, independent of the launcher.

torchrun sets OMP_NUM_THREADS=1 for its ranks if the variable is unset. ``deepspeed`` sets nothing, so each
rank would use every core; with ``--bind_cores_to_rank`` it binds each rank to its own cores. A user's
OMP_NUM_THREADS is an upper bound. run.threads overrides everything.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel since Cooper Lake, AMD since Zen 4; bf16: ARM


@dataclass(frozen=True)
class Cores:
    """CPU cores available to one process."""

    machine: str
    usable: frozenset[int]  # indices of the cores that the process may run on
    quota: float  # number of cores that it may use at once (a container's limit); inf: no limit


@dataclass(frozen=True)
class Threads:
    """Number of threads of this rank, and the cores that the ranks on its machine share."""

    each: int  # threads of this rank
    cores: int  # cores that the ranks on its machine may use together
    ranks: int  # number of ranks on its machine
    waits: str = ""  # how waiting threads behave, see spinning.py; empty: as the OpenMP runtime decides

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.each} per rank ({cores}, {ranks} on this machine){'; ' * bool(self.waits)}{self.waits}"


def own_cores() -> Cores:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Cores(platform.node(), frozenset(usable), cpu_quota(CGROUP))


def cpu_quota(cgroup: Path) -> float:
    """Returns the CPU quota of this process's container in cores, or inf if there is no quota.

    cgroup v2 and v1 store the quota in different files.
    """
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((cgroup / file).read_text() for file in files).split()
        except OSError:  # the machine uses the other version, or no cgroup
            continue
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def user_limit(environment: Mapping[str, str]) -> int | None:
    """Returns the user's OMP_NUM_THREADS, or None. Ignores the 1 that torchrun sets by default."""
    given = environment.get("OMP_NUM_THREADS", "")
    if not given.isdecimal() or int(given) < 1 or ("TORCHELASTIC_RUN_ID" in environment and given == "1"):
        return None
    return int(given)


def share(rank: int, ranks: Sequence[Cores], requested: int | None, limit: int | None = None) -> Threads:
    """Computes the number of threads of ``rank`` from the cores of all ranks.

    ``requested`` (run.threads) takes precedence. Otherwise, the ranks that may run on a core share it
    equally, and the number of threads is the sum of this rank's shares, rounded down, but at least 1. It is
    at most ``limit`` (OMP_NUM_THREADS), and at most this rank's equal share of the container's quota.
    """
    own = ranks[rank]
    local = [cores for cores in ranks if cores.machine == own.machine]
    fair = sum(1 / sum(core in cores.usable for cores in local) for core in own.usable)
    together = len(frozenset().union(*(cores.usable for cores in local)))
    each = requested or max(1, math.floor(min(fair, own.quota / len(local), limit or math.inf) + 1e-9))
    return Threads(each, math.ceil(min(together, own.quota)), len(local))


def computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Returns whether the processor multiplies bf16 matrices in hardware; None if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    flags = [set(words.split()) for name, _, words in fields if name.strip() in ("flags", "Features")]
    return any(BF16_FLAGS & words for words in flags) if flags else None
