"""Performance metrics of a PPO step (perf/*, mem/*)."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.compute.sizes import causal_pairs, decode_bytes
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.run.performance import Capacity, UpdateCost, measured_capacity, memory, throughput, update_cost
from ppo_ds.types import Experience, Metrics


@dataclass(frozen=True, kw_only=True)
class Meter:
    """Computes perf/* and mem/* of a step from its experience and its timings."""

    world: World
    capacity: Capacity
    actor: UpdateCost
    critic: UpdateCost | None  # None without a critic, and when the value head is on the actor
    weight_bytes: int  # bytes per weight of the decoding model, and per number in its KV cache

    def __call__(self, experience: Experience, times: Metrics, metrics: Metrics) -> Metrics:
        """Computes perf/* and mem/* from the experience and other metrics. All ranks must call this."""
        tokens, lengths = int(experience.attention_mask.sum()), experience.generated_lengths
        more = ("rollout/dropped_tokens", "rollout/greedy_tokens")
        generated = float(lengths.sum()) + sum(metrics.get(name, 0.0) for name in more)
        return (
            throughput(tokens, len(experience), times["time/step"], self.world.size)
            | {"perf/gen_tokens_per_s": generated / times["time/generate"]}
            | self.utilization(experience, generated, times, metrics)
            | memory(self.world)
        )

    def utilization(
        self, experience: Experience, generated: float, times: Metrics, metrics: Metrics
    ) -> Metrics:
        """Returns perf/mfu_* and perf/hbm_frac_decode, the used fractions of the peak capacity.

        Computed from the minimum FLOPs of the updates, without algo.ptx, and the minimum bytes of decoding.
        """
        lengths = experience.attention_mask.sum(1).tolist()
        head_positions = int(experience.response_lengths.sum())
        roles = {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})
        found = {}
        for name, role in roles.items():
            if seconds := times.get(f"time/update_{name}"):
                flops = role.flops(lengths, head_positions, metrics["policy/epochs_run"])
                found[f"perf/mfu_{name}"] = flops / seconds / self.capacity.flops
        decoded = self.decoded_bytes(experience, generated)
        return found | {"perf/hbm_frac_decode": decoded / times["time/generate"] / self.capacity.bytes}

    def decoded_bytes(self, experience: Experience, generated: float) -> float:
        """Returns the minimum number of bytes that decoding ``generated`` tokens reads, over all ranks."""
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
        return read * generated / max(sum(responses), 1)


def build_meter(world: World, actor: HybridActor, critic: TrainedModel | None) -> Meter:
    """Measures the machine and builds the meter of a run. All ranks must call this."""
    lm = actor.module.lm
    return Meter(
        world=world,
        capacity=measured_capacity(world, lm.dtype),
        actor=update_cost(actor, lm),
        critic=None if critic is None else update_cost(critic, critic.module.model),
        weight_bytes=lm.dtype.itemsize,
    )
