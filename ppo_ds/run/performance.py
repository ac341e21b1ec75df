"""Performance metrics of a training step: throughput, utilization and peak memory (perf/*, mem/*)."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ppo_ds.compute.sizes import Size, causal_pairs, forward_flops
from ppo_ds.distributed.world import World
from ppo_ds.engine.peak import bytes_per_s, gemm_flops_per_s
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.models.size import size_of
from ppo_ds.types import Metrics

# Bytes of each of the two buffers that measure the memory bandwidth of a CPU. The first optimizer step
# allocates more, except for toy models, so the buffers do not raise mem/*.
CPU_BUFFER = 2**26


@dataclass(frozen=True)
class Capacity:
    """Peak capacity of all ranks together, per second."""

    flops: float  # FLOPs of matrix products in the actor's dtype
    bytes: float  # bytes read from and written to memory


def measured_capacity(world: World, dtype: torch.dtype) -> Capacity:
    """Measures the peak capacity in half a second, on all ranks at once. All ranks must call this."""
    world.barrier()
    size = CPU_BUFFER if world.device.type == "cpu" else None
    mine = [gemm_flops_per_s(world.device, dtype, seconds=0.2), bytes_per_s(world.device, size, seconds=0.2)]
    if world.device.type == "cuda":  # the peak memory of training must not include the buffers
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Capacity(*world.sum(torch.tensor(mine, dtype=torch.float64)).tolist())


@dataclass(frozen=True)
class UpdateCost:
    """The size of a trained model and the cost of its update."""

    size: Size
    # cost in forwards: 3 (the forward, the gradients of activations, the gradients of weights), or 2 if most
    # weights are frozen (LoRA)
    forwards: int

    def flops(self, lengths: Sequence[int], head_positions: int, passes: float) -> float:
        """Computes the minimum FLOPs of ``passes`` updates over rows of ``lengths`` tokens."""
        forward = forward_flops(
            self.size, tokens=sum(lengths), pairs=causal_pairs(lengths), head_positions=head_positions
        )
        return self.forwards * passes * forward


def update_cost(model: TrainedModel, body: torch.nn.Module) -> UpdateCost:
    trained, total = parameter_counts(model.module)
    return UpdateCost(size_of(body), 3 if 2 * trained > total else 2)


def throughput(tokens: int, samples: int, seconds: float, ranks: int) -> Metrics:
    """Returns tokens (no padding) and samples per second of all ranks, and tokens per second per rank."""
    return {
        "perf/tokens_per_s": tokens / seconds,
        "perf/tokens_per_s_gpu": tokens / seconds / ranks,
        "perf/samples_per_s": samples / seconds,
    }


def host_peak() -> int:
    """Returns the peak resident memory of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(world: World) -> Metrics:
    """Returns mem/*: the peak memory so far in GiB, maximum over ranks. All ranks must call this."""
    peaks = {"mem/host_rss_gb": host_peak() / 2**20}
    if world.device.type == "cuda":
        peaks["mem/alloc_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        peaks["mem/reserved_peak_gb"] = torch.cuda.max_memory_reserved() / 2**30
    highest = world.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist()
    return dict(zip(peaks, highest, strict=True))
