"""The devices that a run is diagnosed for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ppo_ds.engine.memory_budget import GIB, format_bytes
from ppo_ds.errors import UserError
from ppo_ds.tools.doctor.gpus import GPUS, Device, find_gpu, recognized

# for GPUs without a name: those of the table's 80 GB cards, which torch reports as less than 80 GiB
DEFAULT_GPU_MEM = GPUS["h100"].memory_gib
DEFAULT_PER_NODE = 8


@dataclass(frozen=True)
class Cluster:
    """Ranks of a run, one for each device."""

    ranks: int
    per_node: int  # ranks on each node
    gpu_memory: int | None  # bytes of each GPU; None if the run is on CPUs
    gpu: Device | None  # the row of the table of GPUs; None for CPUs and for a GPU that is not in the table
    is_this_machine: bool = False  # no option describes other devices, so local disks and memory are its own

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node

    def __str__(self) -> str:
        if self.gpu_memory is None:
            device = "rank(s) on CPUs"
        else:
            name = "GPU(s)" if self.gpu is None else f"{self.gpu.name} GPU(s)"
            device = f"{name} of {format_bytes(self.gpu_memory)}"
        where = f", {self.per_node} on each of {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} {device}{where}"


def cluster_of(name: str | None, gpus: int | None, nodes: int | None, memory: float | None) -> Cluster:
    """Returns the devices of the options --gpu, --gpus, --nodes and --gpu-mem.

    Without any of these it returns the GPUs of this machine, or one rank on its CPU. ``gpus`` counts the GPUs
    of each node if ``nodes`` is given, and otherwise all GPUs, in nodes of the size in the table or of
    DEFAULT_PER_NODE.
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
