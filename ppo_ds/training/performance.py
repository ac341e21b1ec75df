"""Performance metrics of a PPO step: throughput, utilization and peak memory (perf/*, mem/*)."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.peak import bytes_per_s, gemm_flops_per_s
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.models.size import size_of
from ppo_ds.ops.flops import Size, causal_pairs, decode_bytes, forward_flops
from ppo_ds.types import Experience, Metrics

# Bytes of each of two buffers on the CPU. Except for toy models the first optimizer step allocates more, so
# the buffers do not raise mem/*.
CPU_BUFFER = 2**26


@dataclass(frozen=True)
class Capacity:
    """Peak capacity of all ranks together, per second."""

    flops: float  # of matrix products in the actor's dtype
    bytes: float  # to and from memory


def measured_capacity(world: World, dtype: torch.dtype) -> Capacity:
    """Measures the peak capacity in half a second. A collective.

    All ranks measure at the same time, since ranks on one machine share its memory bandwidth.
    """
    world.barrier()
    size = CPU_BUFFER if world.device.type == "cpu" else None
    mine = [gemm_flops_per_s(world.device, dtype, seconds=0.2), bytes_per_s(world.device, size, seconds=0.2)]
    if world.device.type == "cuda":  # the buffers do not count as the training's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Capacity(*world.sum(torch.tensor(mine, dtype=torch.float64)).tolist())


@dataclass(frozen=True)
class UpdateCost:
    """The size of a trained model and what its update costs."""

    size: Size
    # cost in forwards: one each for the forward, the gradients of activations and those of weights unless
    # most weights are frozen (LoRA)
    forwards: int


def update_cost(model: TrainedModel, body: torch.nn.Module) -> UpdateCost:
    trained, total = parameter_counts(model.module)
    return UpdateCost(size_of(body), 3 if 2 * trained > total else 2)


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Computes perf/* and mem/* of a step from its experience and its timings."""

    world: World
    capacity: Capacity
    actor: UpdateCost
    critic: UpdateCost | None  # None without a critic, and when the value head is on the actor
    weight_bytes: int  # of one weight of the decoding model, and of one number in its cache

    def __call__(self, experience: Experience, times: Metrics, metrics: Metrics) -> Metrics:
        """Computes them from the experience of all ranks, time/* and the other metrics. A collective."""
        return (
            throughput(experience, times, metrics, self.world.size)
            | self.utilization(experience, times, metrics)
            | memory(self.world)
        )

    def utilization(self, experience: Experience, times: Metrics, metrics: Metrics) -> Metrics:
        """Returns perf/mfu_* and perf/hbm_frac_decode, the used fractions of the capacity during a phase.

        perf/mfu_* counts the minimum FLOPs of the updates, without the texts of algo.ptx.
        perf/hbm_frac_decode counts the minimum bytes that decoding reads (weights and cache), as if each rank
        decoded all its rows in one batch.
        """
        lengths = experience.attention_mask.sum(1).tolist()
        work = {
            "tokens": sum(lengths),
            "pairs": causal_pairs(lengths),
            "head_positions": int(experience.response_lengths.sum()),
        }
        roles = {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})
        found = {}
        for name, role in roles.items():
            if seconds := times.get(f"time/update_{name}"):
                flops = role.forwards * metrics["policy/epochs_run"] * forward_flops(role.size, **work)
                found[f"perf/mfu_{name}"] = flops / seconds / self.capacity.flops
        return found | {
            "perf/hbm_frac_decode": self.decoded_bytes(experience, metrics)
            / times["time/generate"]
            / self.capacity.bytes
        }

    def decoded_bytes(self, experience: Experience, metrics: Metrics) -> float:
        """Returns the minimum number of bytes that decoding reads, over all ranks.

        Of responses that dynamic sampling dropped only the number of tokens is known. Each of their tokens is
        assumed to cost as much as the others.
        """
        prompts, responses = experience.prompt_lengths.tolist(), experience.response_lengths.tolist()
        steps = max(*responses, 1) - 1  # the first token comes from the prompt's forward
        contexts = sum(
            causal_pairs([p + r - 1]) - causal_pairs([p])
            for p, r in zip(prompts, responses, strict=True)
            if r
        )
        read = decode_bytes(
            self.actor.size, steps=steps * self.world.size, contexts=contexts, bytes_each=self.weight_bytes
        )
        return read * generated(experience, metrics) / max(sum(responses), 1)


def build_meter(world: World, actor: HybridActor, critic: TrainedModel | None) -> Meter:
    """Measures the machine and returns the meter of a run. A collective."""
    lm = actor.module.lm
    return Meter(
        world=world,
        capacity=measured_capacity(world, lm.dtype),
        actor=update_cost(actor, lm),
        critic=None if critic is None else update_cost(critic, critic.module.model),
        weight_bytes=lm.dtype.itemsize,
    )


def generated(experience: Experience, metrics: Metrics) -> float:
    """Returns the number of generated tokens, including responses that dynamic sampling dropped."""
    return float(experience.response_lengths.sum()) + metrics.get("rollout/dropped_tokens", 0.0)


def throughput(experience: Experience, times: Metrics, metrics: Metrics, ranks: int) -> Metrics:
    """Returns tokens and samples per second of the step, and new tokens per second of generation.

    Padding does not count. Rates cover all ranks together, except ``_gpu``, which is per rank.
    """
    tokens, step = int(experience.attention_mask.sum()), times["time/step"]
    return {
        "perf/tokens_per_s": tokens / step,
        "perf/tokens_per_s_gpu": tokens / step / ranks,
        "perf/gen_tokens_per_s": generated(experience, metrics) / times["time/generate"],
        "perf/samples_per_s": len(experience) / step,
    }


def host_peak() -> int:
    """Returns the peak resident memory of this process in KB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(world: World) -> Metrics:
    """Returns mem/*: peak memory since the start in GB, the maximum over ranks. A collective."""
    peaks = {"mem/host_rss_gb": host_peak() / 2**20}
    if world.device.type == "cuda":
        peaks["mem/alloc_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        peaks["mem/reserved_peak_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return dict(
        zip(peaks, world.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist(), strict=True)
    )
