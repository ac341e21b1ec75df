"""Process group: the rank of this process and the collectives of the trainer."""

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
from ppo_ds.distributed.threads import Threads, own_cores, share, user_limit
from ppo_ds.errors import UserError

T = TypeVar("T")
# minutes by which the timeout of collectives exceeds that of the watchdog, whose report is more informative
COLLECTIVE_MARGIN = 1.0


class Waiting:
    """Sums the seconds that this rank spends in blocking collectives, mostly waiting for slower ranks."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._device.type == "cuda":  # work that is still queued on the device is this rank's own
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Returns the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class World:
    """All ranks of the run.

    Every method but ``is_main`` and ``quiet`` is a collective: each rank must call it, in the same order.
    """

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

    def _measured(self, x: Tensor) -> AbstractContextManager[None]:
        """Measures a collective of ``x`` as waiting if ``x`` is on the CPU. On a GPU it is asynchronous."""
        return self.waiting() if x.device.type == "cpu" else nullcontext()

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over all ranks as a new tensor on ``x``'s device."""
        with self._measured(x):
            total = x.detach().to(self.device, copy=True)
            dist.all_reduce(total)
            return total.to(x.device)

    def max(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of ``x`` over all ranks as a new tensor on ``x``'s device."""
        with self._measured(x):
            largest = x.detach().to(self.device, copy=True)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            return largest.to(x.device)

    def max_int(self, n: int) -> int:
        """Returns the largest ``n`` of all ranks."""
        return int(self.max(torch.tensor(n)))

    def concat(self, x: Tensor) -> Tensor:
        """Concatenates ``x`` of all ranks in rank order, [b, ...] -> [size * b, ...], of equal shapes."""
        x = x.to(self.device).contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._measured(x):
            dist.all_gather(parts, x)
        return torch.cat(parts)

    def gather_objects(self, item: T) -> list[T]:
        """Returns every rank's ``item`` on every rank, in rank order. Items are pickled: keep them small."""
        items: list[Any] = [None] * self.size
        with self.waiting():
            dist.all_gather_object(items, item)
        return items

    def quiet(self) -> AbstractContextManager[Any]:
        """Suppresses what DeepSpeed prints at start-up at any log level. Not a collective."""
        return nullcontext() if self.verbose else redirect_stdout(io.StringIO())

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        with self.waiting():
            dist.barrier()

    def close(self) -> None:
        """Leaves the process group once all ranks have called it; leaving earlier would abort the others."""
        dist.barrier()
        dist.destroy_process_group()


def single_process_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a launcher would set, for plain ``python``; {} under a launcher."""
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
    """Joins the other ranks over NCCL on GPUs and over gloo on CPUs.

    The timeout of collectives is ``timeout_minutes`` + COLLECTIVE_MARGIN. ``threads`` is the number per rank;
    None uses this rank's share of the cores (distributed/threads.py).

    DeepSpeed's shared-memory collectives for CPUs are switched off first: they compile C++ on first use, hang
    on a stale lock, and leak 66 MiB of /dev/shm per rank and run. The results of gloo are bit-identical.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    single = single_process_environment(os.environ)
    os.environ.update(single)
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    timeout = timedelta(minutes=timeout_minutes + COLLECTIVE_MARGIN)
    if single:  # on any free port, so that two runs on one machine do not collide
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
        os.environ["MASTER_PORT"] = str(store.port)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        deepspeed.init_distributed(timeout=timeout, verbose=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}: the port is in use by another run on this machine; "
            "give the launcher a free --master_port"
        ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    cores: list[Any] = [None] * size
    dist.all_gather_object(cores, own_cores())
    share_of_cores = share(rank, cores, threads, user_limit(os.environ))
    torch.set_num_threads(share_of_cores.each)
    os.environ["OMP_NUM_THREADS"] = str(share_of_cores.each)  # for subprocesses
    return World(rank, size, local_rank, device, share_of_cores, Waiting(device), verbose)


def seed_everything(seed: int) -> None:
    """Seeds torch on CPU and GPU, numpy and python.

    Callers add an offset per rank where ranks must draw different numbers (sampling).
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
