"""Defines the devices for which a run is diagnosed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ppo_ds.compute.sizes import Shape
from ppo_ds.distributed.threads import own_cores, share, user_limit
from ppo_ds.engine.memory_budget import GIB, format_bytes
from ppo_ds.engine.peak import Clock, bytes_per_s, gemm_flops_per_s
from ppo_ds.errors import UserError
from ppo_ds.tools.doctor.gpus import GPUS, Device, find_gpu, recognized

# for GPUs without a name: the GiB of the table's 80 GB cards, which torch reports as less than 80 GiB
DEFAULT_GPU_MEM = GPUS["h100"].memory_gib
DEFAULT_PER_NODE = 8
# sizes with which the rates of a CPU are measured
ROWS = 2048  # tokens of a product
WIDEST = 2048  # maximum width of a product: the rate of a wider one is the same, and takes longer to measure
BUFFER = 2**26  # bytes of each of the two buffers that measure the memory
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cluster:
    """Ranks of a run, one for each device."""

    ranks: int
    per_node: int  # ranks on each node
    gpu_memory: int | None  # bytes of each GPU; None if the run is on CPUs
    gpu: Device | None  # the row of the table of GPUs; None for CPUs and for a GPU that is not in the table
    is_this_machine: bool = False  # True if no option describes other devices

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    def __str__(self) -> str:
        if self.gpu_memory is None:
            device = "rank(s) on CPUs"
            advice = "; more ranks on one machine need more memory, and may take longer"
        else:
            name = "GPU(s)" if self.gpu is None else f"{self.gpu.name} GPU(s)"
            device, advice = f"{name} of {format_bytes(self.gpu_memory)}", ""
        where = f", {self.per_node} on each of {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} {device}{where}{advice}"


def cluster_of(name: str | None, gpus: int | None, nodes: int | None, memory: float | None) -> Cluster:
    """Returns the devices that the options --gpu, --gpus, --nodes and --gpu-mem describe.

    If ``name``, ``gpus`` and ``memory`` (GiB) are None, each of the ``nodes`` (None: 1) is like this machine:
    its GPUs, or one rank on its CPU. Otherwise ``gpus`` is the number of GPUs per node if ``nodes`` is given,
    else the total. A total is divided into nodes of the size that the table of GPUs has for ``name``, or of
    DEFAULT_PER_NODE GPUs if ``name`` is None. Raises UserError if the nodes would differ in size.
    """
    gpu = None if name is None else find_gpu(name)
    if gpu is None and gpus is None and memory is None:
        return _this_machine(nodes)
    if memory is None:
        memory = DEFAULT_GPU_MEM if gpu is None else gpu.memory_gib
    size = int(memory * GIB)
    if nodes is not None:
        per_node = gpus or (gpu.per_node if gpu else 1)
        return Cluster(per_node * nodes, per_node, size, gpu)
    ranks = gpus or 1
    per_node = min(ranks, gpu.per_node if gpu else DEFAULT_PER_NODE)
    if ranks % per_node:
        raise UserError(
            f"--gpus={ranks}: not a multiple of the {per_node} GPUs of a node; with --nodes, --gpus is the "
            "number on each node"
        )
    return Cluster(ranks, per_node, size, gpu)


def _this_machine(nodes: int | None) -> Cluster:
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    count, alone = nodes or 1, nodes is None
    if not found:
        return Cluster(count, 1, None, None, alone)
    size = min(each.total_memory for each in found)
    return Cluster(len(found) * count, len(found), size, recognized(found[0].name), alone)


def cpu_device(
    shape: Shape, dtype: str, ranks: int, threads: int | None, clock: Clock | None = None
) -> Device:
    """Measures the speed of matrix products and memory on this CPU, for one of ``ranks`` ranks.

    The matrices have the widths in ``shape``. This takes about half a second. ``threads`` is run.threads;
    ``clock`` is time.perf_counter by default. The links between ranks are not measured; they are assumed to
    have a quarter of the memory's bandwidth.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(share(0, [own_cores()] * ranks, threads, user_limit(os.environ)).each)
    try:
        cpu = torch.device("cpu")
        hidden, inner = (min(width, WIDEST) for width in (shape.hidden, shape.inner))
        sizes = [(ROWS, hidden, inner), (ROWS, inner, hidden)]
        flops = gemm_flops_per_s(cpu, DTYPES[dtype], sizes, clock=clock) / 1e12
        memory = bytes_per_s(cpu, BUFFER, clock=clock) / 1e9
    finally:
        torch.set_num_threads(before)
    link = memory / 4
    return Device("CPU", 0, flops, flops, flops, memory, link, link, link, ranks, "measured now")
