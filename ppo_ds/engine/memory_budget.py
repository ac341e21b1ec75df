"""Memory budget of the generation phase, and its plan for gathering weights and offloading states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ppo_ds.distributed.threads import CGROUP
from ppo_ds.distributed.world import World

GIB, MIB = 2**30, 2**20
USABLE = 0.9  # usable fraction of the free memory; the rest is lost to fragmentation
LAZY = GIB // 2  # GPU memory that is allocated after the start-up: kernels, workspaces, buffers of NCCL
LIBRARIES = GIB  # CPU memory of the imported libraries, and of other programs on the machine


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one rank's device outside generation, and the needs of generation, in bytes."""

    free: int  # smallest free memory of all ranks, minus optimizer states that are not allocated yet
    weights: int  # size of the whole model; 0 if every rank has all weights (ZeRO 0 to 2)
    layer: int  # upper bound of what ZeRO-3 gathers at once; 0 if every rank has all weights
    decoding: int  # KV cache and activations
    offloadable: int  # optimizer states and gradient buffers

    @property
    def usable(self) -> int:
        """Free bytes that generation may use."""
        return int(self.free * USABLE)


@dataclass(frozen=True)
class GenerationPlan:
    """Describes how generation gathers weights, and whether it offloads optimizer states."""

    gather_once: bool  # the weights are gathered once per phase; otherwise layer by layer in each forward
    offload_states: bool  # optimizer states are in CPU memory during generation


def plan_generation(
    budget: MemoryBudget, *, generation_gather: str, offload_states: str, on_gpu: bool
) -> GenerationPlan:
    """Resolves ``generation_gather`` and ``offload_states`` of actor.zero if they are auto.

    Offloading costs time once per phase, and gathering by layers once per token. If memory is short, auto
    therefore offloads states first and gathers by layers only if that is not enough. On a CPU auto never
    offloads, since the states would stay in the same memory.
    """
    may_offload = offload_states == "always" or (offload_states == "auto" and on_gpu)
    available = budget.usable + (budget.offloadable if may_offload else 0)
    fits = budget.weights + budget.decoding <= available
    gather_once = generation_gather == "whole" or (generation_gather == "auto" and fits)
    exceeds_free = (budget.weights if gather_once else budget.layer) + budget.decoding > budget.usable
    offload = offload_states == "always" or (may_offload and exceeds_free and budget.offloadable > 0)
    return GenerationPlan(gather_once, offload)


def describe_plan(budget: MemoryBudget, plan: GenerationPlan, *, sharded: bool) -> str:
    """Describes the plan in one line for the start-up banner; "" if there was nothing to decide."""
    if not (sharded or plan.offload_states):
        return ""
    decoding = f"{format_bytes(budget.decoding)} for cache and activations"
    weights = format_bytes(budget.weights)
    if not sharded:
        how = f"weights as trained, {decoding}"
    elif plan.gather_once:
        how = f"weights gathered once per phase: {weights}, {decoding}"
    else:
        layer = format_bytes(budget.layer)
        how = f"weights gathered layer by layer in each forward: up to {layer} of {weights}, {decoding}"
    offloaded = ""
    if plan.offload_states:
        offloaded = f"; {format_bytes(budget.offloadable)} of optimizer states and gradient buffers offloaded"
    return f"generation {how}; {format_bytes(budget.free)} free{offloaded}"


def format_bytes(size: int) -> str:
    """Formats a number of bytes in GiB, or in MiB below 0.1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def free_bytes(world: World) -> int:
    """Returns the free memory of this rank's device.

    On a CPU this is the rank's share of the machine's available memory; a container's limit is ignored.
    """
    if world.device.type == "cpu":
        return psutil.virtual_memory().available // world.threads.ranks
    free, _ = torch.cuda.mem_get_info(world.device)
    return free + torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)


def tensor_memory(world: World, resident: int) -> int:
    """Returns the bytes that all tensors of a rank may take together. All ranks must call this.

    The result is the minimum over ranks. On a GPU it is the free memory plus that of existing tensors, minus
    LAZY. ``resident`` is the expected size of the tensors between two phases; existing tensors count up to
    this size, since memory above it is never freed. On a CPU it is the rank's share of the machine's memory
    minus LIBRARIES, the same at each launch of the run.
    """
    if world.device.type == "cpu":
        own = cpu_memory(world.threads.ranks)
    else:
        own = min(torch.cuda.memory_allocated(world.device), resident) + free_bytes(world) - LAZY
    return max(0, -world.max_int(-own))


def cpu_memory(ranks: int) -> int:
    """Returns the bytes that the tensors of one of ``ranks`` ranks on this machine may take."""
    return max(0, host_memory() // ranks - LIBRARIES)


def host_memory(cgroup: Path = CGROUP) -> int:
    """Returns the CPU memory of this machine in bytes, or the container's limit if it is lower."""
    limits = [psutil.virtual_memory().total]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, v1
        try:
            text = (cgroup / file).read_text().strip()
        except OSError:  # the machine uses the other version, or no cgroup
            continue
        limits += [int(text)] if text.isdigit() else []  # "max": no limit
    return min(limits)
