"""The process group: who we are among the ranks, and the few collectives the trainer needs."""

from __future__ import annotations

import io
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ppo_ds.distributed.allocator import keep_freed_memory
from ppo_ds.distributed.threads import Threads, own_cores, share, users_bound
from ppo_ds.errors import UserError

T = TypeVar("T")
LATER = 1.0  # minutes by which a collective waits longer than distributed/watchdog.py, whose report says more


class Waiting:
    """Seconds that this rank has spent in collectives whose result it reads at once: mostly waiting for those that come later."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._device.type == "cuda":  # what the device has still to do is this rank's own work
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class World:
    """All ranks of the run. Every method but ``is_main`` is a collective: each rank must call it, in the same order."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    threads: Threads
    waiting: Waiting
    verbose: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def _reading(self, x: Tensor) -> AbstractContextManager[None]:
        """Around a collective. What is asked for on the CPU is waited for; the rest a device does by itself."""
        return self.waiting() if x.device.type == "cpu" else nullcontext()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks, as a new tensor on ``x``'s device."""
        with self._reading(x):
            total = x.detach().to(self.device, copy=True)
            dist.all_reduce(total)
            return total.to(x.device)

    def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of ``x`` over all ranks, as a new tensor."""
        with self._reading(x):
            largest = x.detach().to(self.device, copy=True)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            return largest.to(x.device)

    def max_int(self, n: int) -> int:
        """The largest of the ranks' numbers: how they agree on a count."""
        return int(self.max(torch.tensor(n)))

    def concat(self, x: Tensor) -> Tensor:
        """[b,...] of each rank -> [size*b,...], in the order of the ranks; the same shape is due on each."""
        x = x.to(self.device).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._reading(x):
            dist.all_gather(parts, x)
        return torch.cat(parts)

    def gather_objects(self, item: T) -> list[T]:
        """Each rank's ``item`` on every rank (pickled: for small things)."""
        items: list[Any] = [None] * self.size
        with self.waiting():
            dist.all_gather_object(items, item)
        return items

    def quiet(self) -> AbstractContextManager[Any]:
        """Around DeepSpeed's start-up, some of which is printed whatever the log level. Not a collective."""
        return nullcontext() if self.verbose else redirect_stdout(io.StringIO())

    def barrier(self) -> None:
        with self.waiting():
            dist.barrier()

    def close(self) -> None:
        """Leave together: a rank that ends while another still talks aborts it."""
        dist.barrier()
        dist.destroy_process_group()


def single_process_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What plain ``python`` lacks and a launcher would set; {} under a launcher."""
    if "RANK" in environment:
        return {}
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


def connect(timeout_minutes: float, verbose: bool = False, threads: int | None = None) -> World:
    """Join the other ranks over NCCL on GPUs, gloo on CPUs. ``timeout_minutes``: without a sign of life, which end a run.

    ``threads``: of each rank; None: its share of the cores.

    DeepSpeed's shared-memory collectives for CPUs are switched off first: they compile C++ on first use, hang on a stale
    lock, and leak 66 MiB of /dev/shm per rank and run. gloo gives the same bits.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    alone = single_process_environment(os.environ)
    os.environ.update(alone)
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    timeout = timedelta(minutes=timeout_minutes + LATER)
    if alone:  # any free port will do, and two runs on one machine must not meet
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
        os.environ["MASTER_PORT"] = str(store.port)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1, timeout=timeout
        )
    try:
        deepspeed.init_distributed(timeout=timeout, verbose=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        taken = os.environ["MASTER_PORT"]
        raise UserError(
            f"MASTER_PORT={taken}: another run on this machine has it; give the launcher a free --master_port"
        ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, local_rank, device, _take_threads(rank, size, threads), Waiting(device), verbose)


def _take_threads(rank: int, size: int, asked: int | None) -> Threads:
    """Set for torch in this process, and for what it starts. A collective."""
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, own_cores())
    threads = share(rank, ranks, asked, users_bound(os.environ))
    torch.set_num_threads(threads.each)
    os.environ["OMP_NUM_THREADS"] = str(threads.each)
    return threads


def seed_everything(seed: int) -> None:
    """Seed torch on CPU and GPU, numpy and python. Ranks add their own offset where they must draw different numbers (sampling)."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
