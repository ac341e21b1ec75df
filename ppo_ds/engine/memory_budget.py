"""Memory for generation: what there is, what decoding takes, and what follows for an actor whose weights are sharded or whose room is short."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from ppo_ds.distributed.world import World

GIB, MIB = 2**30, 2**20
USABLE = 0.9  # of what is free: the rest goes to the fragments between tensors


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one rank's device, in training."""

    free: int  # of the rank that has least; optimizer states that are still to come are taken off
    weights: int  # of the whole model; 0 where it is whole already (ZeRO 0 to 2)
    layer: int  # of what ZeRO-3 gathers of it at once, at most; 0 where it is whole already
    decoding: int  # cache and activations
    idle: int  # optimizer states and gradient buffers that could make way

    @property
    def usable(self) -> int:
        return int(self.free * USABLE)


@dataclass(frozen=True)
class Choice:
    whole: bool  # the weights are gathered once for a phase; else layer by layer in each forward
    states_away: bool


def choose(room: MemoryBudget, *, generate: str, offload_states: str, on_gpu: bool) -> Choice:
    """``generate``, ``offload_states``: as in actor.zero, auto included.

    States that move pay once per phase and layers once per token, so auto moves states before it turns to layers. It moves none on a CPU, where
    they would stay in the same memory.
    """
    may_move = offload_states == "always" or (offload_states == "auto" and on_gpu)
    most = room.usable + (room.idle if may_move else 0)
    whole = generate == "whole" or (generate == "auto" and room.weights + room.decoding <= most)
    short = (room.weights if whole else room.layer) + room.decoding > room.usable
    return Choice(whole, offload_states == "always" or (may_move and short and room.idle > 0))


def explain(room: MemoryBudget, choice: Choice, *, sharded: bool) -> str:
    """The arithmetic in one line, for the start-up banner; "" where there was nothing to choose."""
    if not (sharded or choice.states_away):
        return ""
    decoding = f"{in_words(room.decoding)} for cache and activations"
    if not sharded:
        how = f"weights as they are trained, {decoding}"
    elif choice.whole:
        how = f"weights gathered once per phase: {in_words(room.weights)}, {decoding}"
    else:
        how = f"weights gathered layer by layer in each forward: up to {in_words(room.layer)} of {in_words(room.weights)}, {decoding}"
    offloaded = (
        f"; {in_words(room.idle)} of optimizer states and gradient buffers make way"
        if choice.states_away
        else ""
    )
    return f"generation {how}; {in_words(room.free)} free{offloaded}"


def in_words(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def free_bytes(world: World) -> int:
    """Of this rank's device; on a CPU its share of what the machine has (a container's own limit is not seen)."""
    if world.device.type == "cpu":
        return psutil.virtual_memory().available // world.threads.ranks
    free, _ = torch.cuda.mem_get_info(world.device)
    return free + torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
