"""Collects the results of checks, and checks the machine before a run starts."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from ppo_ds.config.schema import Config
from ppo_ds.engine.memory_budget import GIB, format_bytes, host_memory
from ppo_ds.errors import UserError
from ppo_ds.tools.doctor.cluster import Cluster

T = TypeVar("T")
MIN_SHM = GIB  # NCCL and data loaders of several GPUs need more than the 64 MiB default of docker


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    name: str
    text: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{self.name:<10} {'' if self.ok else 'error: '}{self.text}"


class Report:
    """Collects the results of checks. An error in one check does not stop the others."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    @property
    def errors(self) -> int:
        return sum(not line.ok for line in self.lines)

    def add(self, name: str, text: str, ok: bool = True) -> None:
        self.lines.append(Line(name, text, ok))

    def attempt(
        self, name: str, action: Callable[[], T], describe: Callable[[T], str | None] = lambda _: None
    ) -> T | None:
        """Runs ``action`` and returns its result, or None after a UserError, which is reported.

        ``describe`` returns the line for a result; if it returns None, as by default, no line is added.
        """
        try:
            result = action()
        except UserError as error:
            self.lines += [Line(name, problem, ok=False) for problem in error.problems]
            return None
        if (text := describe(result)) is not None:
            self.add(name, text)
        return result


# -- the machine -------------------------------------------------------------------------------------------


def versions() -> str:
    parts = [
        f"python {platform.python_version()}",
        *(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers", "peft")),
    ]
    driver = Path("/proc/driver/nvidia/version")
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if driver.exists():
        parts.append(f"driver {driver.read_text().split('Kernel Module')[-1].split()[0]}")
    return ", ".join(parts)


def free_disk(config: Config) -> int:
    """Returns the free bytes on the disk of run.dir, which need not exist yet."""
    folder = Path(str(config.run.dir)).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def check_disk(
    config: Config, checkpoint: int, exported: list[int], report: Report, on_this_machine: bool = True
) -> None:
    """Checks the free disk space for all checkpoints and exports of a run.

    The disk must hold the checkpoints and exports that the run keeps, the final export, and one more of each,
    since old ones are deleted only after the next one is written. ``checkpoint`` and ``exported`` are the
    bytes of one checkpoint and of each exported model. If the run is not ``on_this_machine``, the required
    space is only reported.
    """
    settings = config.checkpoint
    kept = 0 if settings.every == 0 else settings.keep_last + 1 + settings.keep_best
    folders = (config.run.steps or 0) // settings.export_every if settings.export_every else 0
    exports = 1 + min(folders, settings.keep_exports + 1 if settings.keep_exports else folders)
    needed = kept * checkpoint + exports * sum(exported)
    text = (
        f"run.dir={config.run.dir}: {format_bytes(needed)} needed ({kept} checkpoints of "
        f"{format_bytes(checkpoint)}, {'export' if exports == 1 else f'{exports} exports'} of "
        f"{format_bytes(sum(exported))})"
    )
    if not on_this_machine:
        report.add("disk", f"{text}; the cluster's disk was not checked")
        return
    free = free_disk(config)
    remedy = "" if needed <= free else "; choose another run.dir or lower checkpoint.keep_last"
    report.add("disk", f"{text}, {format_bytes(free)} free{remedy}", ok=needed <= free)


def check_host(offloaded: int, exported: list[int], cluster: Cluster, report: Report) -> None:
    """Checks the size of /dev/shm, and reports the CPU memory that offloading and the export need.

    ``offloaded`` is the number of offloaded bytes per rank. ``exported`` holds the bytes of each exported
    model; rank 0 copies one at a time to CPU memory. Nothing is checked unless the cluster is this machine.
    """
    shm, several = Path("/dev/shm"), cluster.gpu_memory is not None and cluster.per_node > 1
    if not cluster.is_this_machine:
        if several:
            report.add("/dev/shm", "several GPUs on a node need at least 1 GiB; the cluster was not checked")
    elif shm.exists():
        size = shutil.disk_usage(shm).total
        short = several and size < MIN_SHM
        remedy = "; several GPUs need at least 1 GiB: docker run --ipc=host" if short else ""
        report.add("/dev/shm", format_bytes(size) + remedy, ok=not short)
    sizes = []
    if offloaded:
        node = format_bytes(offloaded * cluster.per_node)
        sizes.append(f"{format_bytes(offloaded)} per rank for offloading, {node} per node")
    if exported and cluster.gpu_memory is not None:
        sizes.append(f"{format_bytes(max(exported))} on rank 0 for the export")
    if sizes:
        here = f"; this machine has {format_bytes(host_memory())}" if cluster.is_this_machine else ""
        report.add("host", "; ".join(sizes) + here)
