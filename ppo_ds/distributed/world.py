"""Process group: the rank of this process and the collectives of the trainer."""

from __future__ import annotations

import io
import logging
import os
import random
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ppo_ds.distributed.memory import keep_freed_memory
from ppo_ds.distributed.open_files import raise_open_files_limit
from ppo_ds.distributed.sequence_group import SequenceGroup
from ppo_ds.distributed.spinning import start_spin_control
from ppo_ds.distributed.threads import Threads, own_cores, share, user_limit
from ppo_ds.errors import UserError

T = TypeVar("T")
# minutes by which the timeout of collectives exceeds the watchdog's timeout, so that the watchdog, whose
# report is more informative, fires first
COLLECTIVE_MARGIN = 1.0
LOOPBACK = "127.0.0.1"


class Waiting:
    """Sums the seconds that this rank spends in blocking collectives, mostly waiting for slower ranks."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._device.type == "cuda":
            # the time of this rank's own queued work must not count as waiting
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Returns the seconds of waiting since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class World:
    """The ranks of the run, as seen from this rank, and their collectives.

    All ranks must call every public method except ``quiet``, in the same order.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    threads: Threads
    waiting: Waiting
    verbose: bool = False
    deterministic: bool = False  # backward passes use deterministic algorithms of torch
    # ranks that divide the tokens of a forward (memory.sequence_parallel); None: ranks divide only rows
    sequence: SequenceGroup | None = None

    @property
    def sequence_ranks(self) -> int:
        """The number of ranks that divide the tokens of a forward."""
        return 1 if self.sequence is None else self.sequence.size

    @property
    def sequence_argument(self) -> dict[str, SequenceGroup]:
        """The keyword argument that divides a forward's tokens among ranks; {} if ranks divide only rows."""
        return {} if self.sequence is None else {"sequence": self.sequence}

    @property
    def data_size(self) -> int:
        """The number of parts into which training divides the rows; a sequence group shares one part."""
        return self.size // self.sequence_ranks

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the rows in training."""
        return self.rank // self.sequence_ranks

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """True on one rank of each node, the one with local rank 0."""
        return self.local_rank == 0

    def _measured(self, x: Tensor) -> AbstractContextManager[None]:
        """Counts the block's time as waiting if ``x`` is on the CPU; GPU collectives are asynchronous."""
        return self.waiting() if x.device.type == "cpu" else nullcontext()

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over all ranks as a new tensor on ``x``'s device."""
        with self._measured(x):
            total = x.detach().to(self.device, copy=True)
            dist.all_reduce(total)
            return total.to(x.device)

    def sum_of_shares(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over sequence groups; ``x`` must be equal on all ranks of a group."""
        return self.sum(x if self.rank % self.sequence_ranks == 0 else torch.zeros_like(x))

    def max(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of ``x`` over all ranks as a new tensor on ``x``'s device."""
        with self._measured(x):
            largest = x.detach().to(self.device, copy=True)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            return largest.to(x.device)

    def max_int(self, n: int) -> int:
        """Returns the maximum of ``n`` over all ranks."""
        return int(self.max(torch.tensor(n)))

    def concat(self, x: Tensor) -> Tensor:
        """Concatenates ``x``, of equal shape on all ranks, in rank order: [b, ...] -> [size * b, ...]."""
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
        """Suppresses what DeepSpeed prints at start-up regardless of the log level. Not a collective.

        Has no effect if ``verbose``.
        """
        return nullcontext() if self.verbose else redirect_stdout(io.StringIO())

    def on_all(self, action: Callable[[], T]) -> T:
        """Runs ``action`` on every rank and returns this rank's result.

        If ``action`` raises UserError on some ranks, every rank raises the UserError of the first of these
        ranks. The action may take longer than the timeout of collectives.
        """
        result, problems = None, list[str]()
        try:
            result = action()
        except UserError as error:
            problems = error.problems
        self._wait_for_all()
        for found in self.gather_objects(problems):
            if found:
                raise UserError(*found)
        return cast(T, result)

    def on_first_of_node(self, action: Callable[[], T]) -> T:
        """Runs ``action`` on the first rank of every node, and then on all other ranks.

        Returns this rank's result. A download, for example, is then in the node's cache when the other ranks
        look for it. UserErrors are raised on every rank, as by ``on_all``; if a node's first rank raises one,
        the other ranks do not run the action. The action may take longer than the timeout of collectives.
        """
        first = self.is_first_on_node
        result = self.on_all(action if first else lambda: None)
        return cast(T, self.on_all((lambda: result) if first else action))

    def _wait_for_all(self) -> None:
        """Waits until every rank has called this method, without the timeout of collectives.

        Uses the process group's store and no collective. If a rank ends, the watchdog ends the others.
        """
        store = dist.distributed_c10d._get_default_store()
        key = "ppo_ds/calls of _wait_for_all"
        goal = -(-store.add(key, 1) // self.size) * self.size
        pause = 0.001
        while store.add(key, 0) < goal:
            time.sleep(pause)
            pause = min(2 * pause, 0.5)  # on 512 ranks, at most 1,000 requests per second

    def barrier(self) -> None:
        """Waits until every rank has called this method."""
        with self.waiting():
            dist.barrier(device_ids=None if self.device.index is None else [self.device.index])

    def close(self) -> None:
        """Waits for all ranks and leaves the process group. Leaving earlier would abort the other ranks."""
        self.barrier()
        dist.destroy_process_group()


def single_process_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a launcher would set, or {} if a launcher started this process."""
    if "RANK" in environment:
        return {}
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
    }


def is_on_one_machine(environment: Mapping[str, str]) -> bool:
    """Returns whether all ranks of a launch run on this machine."""
    local = environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE"))  # torchrun, deepspeed
    address = environment["MASTER_ADDR"]
    return local == environment["WORLD_SIZE"] or address == "localhost" or address.startswith("127.")


def open_local_store(timeout: timedelta) -> dist.TCPStore | None:
    """Opens the store of a launch on one machine so that other machines cannot reach it.

    torch opens the store on all interfaces, and the store has no authentication: anyone who can connect to it
    could end the run or take part in collectives, which carry pickles. Rank 0 therefore opens the store on
    the loopback interface before torch does. torch then uses the store that it finds at this port. The store
    of torchrun's agent is not changed, and the ranks read from it only the port of their own store.

    Returns the store on rank 0, which must keep it until the process group exists, and None on other ranks.
    """
    store, agent = None, None
    port = int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agent = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout)
        port_key, port = f"ppo_ds/port/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 0
    if os.environ["RANK"] == "0":
        listener = socket.create_server((LOOPBACK, port))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK,
            port,
            int(os.environ["WORLD_SIZE"]),
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # shared with the store that torch opens at this port
            master_listen_fd=listener.detach(),
        )
        if agent is not None:
            agent.set(port_key, str(port))
    elif agent is not None:
        port = int(agent.get(port_key))
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


def join_process_group(on_gpu: bool, timeout: timedelta) -> None:
    """Creates the process group, unless an earlier run in this process has created it.

    If all ranks run on this machine, other machines cannot connect to the ports of the group.

    The group is created by torch, since DeepSpeed (0.19.8) would bind it to a GPU (``device_id``). torch
    would then split every later group from this one, including those of vLLM and those that use gloo. A split
    is a collective of all ranks, even of ranks outside the new group. It would hang if ranks create groups in
    different orders.
    """
    if dist.is_initialized():
        return
    backend, store = "nccl" if on_gpu else "gloo", None
    if is_on_one_machine(os.environ):
        for _, interface in socket.if_nameindex():
            if interface in ("lo", "lo0"):  # loopback on Linux and on macOS
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        if is_on_one_machine(os.environ):
            store = open_local_store(timeout)
        dist.init_process_group(backend, timeout=timeout)
    # DeepSpeed calls barriers without a device; the group uses the GPU of its first collective
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    deepspeed.init_distributed(timeout=timeout, verbose=False)
    del store  # the process group now holds the store


def connect(
    timeout_minutes: float,
    verbose: bool = False,
    threads: int | None = None,
    deterministic: bool = False,
    sequence_ranks: int = 1,
) -> World:
    """Joins the other ranks over NCCL on GPUs and over gloo on CPUs. All ranks must call this.

    The timeout of collectives is ``timeout_minutes`` + COLLECTIVE_MARGIN. ``threads`` is the number of
    threads per rank. If it is None, each rank uses its share of the cores (distributed/threads.py).
    ``sequence_ranks`` consecutive ranks divide the tokens of a forward.

    With ``deterministic``, cuBLAS gets workspaces of a fixed size before its first use, as
    ``torch.use_deterministic_algorithms`` requires.

    DeepSpeed's shared-memory collectives for CPUs are switched off first: they compile C++ on first use, hang
    on a stale lock, and leak 66 MiB of /dev/shm per rank and run. gloo's results are bit-identical to theirs.
    """
    # An empty table marks every op as incompatible. Otherwise, with DeepSpeed's CPU accelerator, its process
    # group reads the table (build_shm_op in deepspeed/comm/torch.py): each rank would run gcc to probe the
    # ops, and build the shared-memory collectives. With the CUDA accelerator, DeepSpeed 0.19.8 does not read
    # the table, but any read of it would run nvcc for many ops, none of which is used here.
    deepspeed.ops.__compatible_ops__ = {}
    if not verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ.update(single_process_environment(os.environ))
    raise_open_files_limit(int(os.environ["WORLD_SIZE"]))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    timeout = timedelta(minutes=timeout_minutes + COLLECTIVE_MARGIN)
    try:
        join_process_group(on_gpu, timeout)
    except (OSError, dist.DistNetworkError) as error:
        if "address already in use" not in str(error).lower():
            raise
        raise UserError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}: the port is in use on this machine, perhaps by "
            "another run; use a free one, such as deepspeed --master_port 29501 ..."
        ) from error
    rank, size = dist.get_rank(), dist.get_world_size()
    cores: list[Any] = [None] * size
    dist.all_gather_object(cores, own_cores())
    share_of_cores = share(rank, cores, threads, user_limit(os.environ))
    torch.set_num_threads(share_of_cores.each)
    os.environ["OMP_NUM_THREADS"] = str(share_of_cores.each)  # for subprocesses
    if not on_gpu:
        waits = start_spin_control(share_of_cores.each, len(own_cores().usable), os.environ)
        share_of_cores = replace(share_of_cores, waits=waits)
    group = SequenceGroup(rank, size, sequence_ranks, timeout) if sequence_ranks > 1 else None
    waiting = Waiting(device)
    return World(rank, size, local_rank, device, share_of_cores, waiting, verbose, deterministic, group)


def seed_everything(seed: int) -> None:
    """Seeds torch on CPU and GPU, numpy and python.

    Where ranks must draw different numbers (sampling), callers add an offset per rank to ``seed``.
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
