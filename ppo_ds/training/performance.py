"""perf/* and mem/*: how fast a step was, how near to what the machine can do, and what it took."""

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

CPU_BUFFER = (
    2**26
)  # bytes; two of them stay below what the first optimizer step adds to all but toy models, and so below the peak of mem/*


@dataclass(frozen=True)
class Capacity:
    """What all ranks together can do at most in a second."""

    flops: float  # products of matrices in the actor's dtype
    bytes: float  # to and from memory


def measured_capacity(world: World, dtype: torch.dtype) -> Capacity:
    """By all ranks at once: ranks that share a machine share its memory too. Takes half a second. A collective."""
    world.barrier()
    size = CPU_BUFFER if world.device.type == "cpu" else None
    mine = [gemm_flops_per_s(world.device, dtype, seconds=0.2), bytes_per_s(world.device, size, seconds=0.2)]
    if world.device.type == "cuda":  # the buffers are no part of the training's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return Capacity(*world.sum(torch.tensor(mine, dtype=torch.float64)).tolist())


@dataclass(frozen=True)
class Learning:
    """A model that learns, as its costs see it."""

    size: Size
    forwards: int  # that an update costs: itself, the gradients of what flows through, and those of the weights, unless they are frozen (LoRA)


def learning(model: TrainedModel, body: torch.nn.Module) -> Learning:
    trained, total = parameter_counts(model.module)
    return Learning(size_of(body), 3 if 2 * trained > total else 2)


@dataclass(frozen=True, kw_only=True)
class Meter:
    """From what a step did and the seconds that it took to perf/* and mem/* of METRICS."""

    world: World
    capacity: Capacity
    actor: Learning
    critic: Learning | None  # None: there is none, or the actor has the value head
    weight_bytes: int  # of one weight that decodes, and of one number in its cache

    def __call__(self, experience: Experience, times: Metrics, metrics: Metrics) -> Metrics:
        """``experience`` of all ranks, ``times`` of the step, ``metrics`` of sampling and learning. A collective."""
        return (
            throughput(experience, times, metrics, self.world.size)
            | self._distance(experience, times, metrics)
            | memory(self.world)
        )

    def _distance(self, experience: Experience, times: Metrics, metrics: Metrics) -> Metrics:
        """perf/mfu_*: FLOPs that the updates cannot do without over those that the machine could have done in their time; texts of algo.ptx left out.

        perf/hbm_frac_decode: bytes that decoding reads at least (weights and cache, as if all rows of a rank were decoded side by side) over those
        that memory could have given while answers were generated.
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
            "perf/hbm_frac_decode": self._decoded(experience, metrics)
            / times["time/generate"]
            / self.capacity.bytes
        }

    def _decoded(self, experience: Experience, metrics: Metrics) -> float:
        """Bytes, over all ranks. Of rounds that dynamic sampling has dropped the tokens alone are known: taken to be as dear as the others."""
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
    """Measures the machine, on all ranks at once. A collective."""
    lm = actor.module.lm
    return Meter(
        world=world,
        capacity=measured_capacity(world, lm.dtype),
        actor=learning(actor, lm),
        critic=None if critic is None else learning(critic, critic.module.model),
        weight_bytes=lm.dtype.itemsize,
    )


def generated(experience: Experience, metrics: Metrics) -> float:
    """Tokens of all answers, also of those that dynamic sampling has dropped."""
    return float(experience.response_lengths.sum()) + metrics.get("rollout/dropped_tokens", 0.0)


def throughput(experience: Experience, times: Metrics, metrics: Metrics, ranks: int) -> Metrics:
    """Real tokens and samples of all ranks per wall-clock second of the whole step; new tokens per second of generation."""
    tokens, step = int(experience.attention_mask.sum()), times["time/step"]
    return {
        "perf/tokens_per_s": tokens / step,
        "perf/tokens_per_s_gpu": tokens / step / ranks,
        "perf/gen_tokens_per_s": generated(experience, metrics) / times["time/generate"],
        "perf/samples_per_s": len(experience) / step,
    }


def host_peak() -> int:
    """KB that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(world: World) -> Metrics:
    """mem/*: peaks in GB since the start, of the rank that took most. A collective."""
    peaks = {"mem/host_rss_gb": host_peak() / 2**20}
    if world.device.type == "cuda":
        peaks["mem/alloc_peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
        peaks["mem/reserved_peak_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return dict(
        zip(peaks, world.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist(), strict=True)
    )
