"""Records the work of a training run, and computes the minimum FLOPs and bytes that it needs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ppo_ds.compute.sizes import causal_pairs, decode_bytes, forward_flops
from ppo_ds.run.performance import UpdateCost


@dataclass(frozen=True)
class Lengths:
    """Prompt and response lengths of one step over all ranks."""

    prompts: list[int]
    responses: list[int]

    @property
    def totals(self) -> list[int]:
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]

    @property
    def decode_steps(self) -> int:
        """The number of decode forwards of the longest row; the prefill gives its first token."""
        return max(self.responses) - 1

    @property
    def contexts(self) -> int:
        """The number of cached positions that the decode forwards read, summed over rows."""
        return sum(
            causal_pairs([total - 1]) - causal_pairs([prompt])
            for prompt, total in zip(self.prompts, self.totals, strict=True)
        )


@dataclass
class Recorder:
    """Wraps a trainer's ``collect`` and records lengths and CPU seconds of each step."""

    stage: Any
    steps: list[Lengths] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._collect, self.stage.collect = self.stage.collect, self

    def __call__(self) -> Any:
        self.cpu.append(time.process_time())
        rollout, scores, metrics = self._collect()
        mine = (rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist())
        shares = self.stage.context.world.gather_objects(mine)
        self.steps.append(Lengths([n for p, _ in shares for n in p], [n for _, r in shares for n in r]))
        return rollout, scores, metrics


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models of a run; ``bytes_each`` is the number of bytes per weight in decoding."""

    actor: UpdateCost
    critic: UpdateCost | None
    bytes_each: int


def sizes(stage: Any) -> Sizes:
    """Returns the sizes that the run's own perf/* metrics use."""
    meter = stage.meter
    return Sizes(meter.actor, meter.critic, meter.weight_bytes)


def phase_flops(sizes: Sizes, step: Lengths, epochs: float) -> dict[str, float]:
    """Computes the minimum FLOPs of each timed phase of one step, over all ranks.

    The head is counted at response positions only. The reward model is assumed to have the size of the
    critic, as it does in the workloads.

    Args:
        epochs: Number of epochs that the update ran, from the metric policy/epochs_run.
    """
    tokens, pairs, positions = sum(step.totals), causal_pairs(step.totals), sum(step.responses)
    read = [total - 1 for total in step.totals]  # the last token of a response is never an input
    actor = forward_flops(sizes.actor.size, tokens, pairs, positions)
    found = {
        "time/generate": forward_flops(sizes.actor.size, sum(read), causal_pairs(read), positions),
        "time/old_logprobs": actor,
        "time/ref_logprobs": actor,
        "time/update_actor": epochs * sizes.actor.forwards * actor,
    }
    if sizes.critic is not None:
        critic = forward_flops(sizes.critic.size, tokens, pairs, positions)
        found |= {
            "time/values": critic,
            "time/reward": critic,
            "time/update_critic": epochs * sizes.critic.forwards * critic,
        }
    return found


def decode_traffic(sizes: Sizes, step: Lengths, ranks: int) -> int:
    """Computes the minimum number of bytes that all ranks together read in generation.

    It is assumed that each rank decodes all its rows together, and reads its weights once per decode step.
    """
    weights = decode_bytes(
        sizes.actor.size, steps=ranks * step.decode_steps, contexts=0, bytes_each=sizes.bytes_each
    )
    return weights + decode_bytes(
        sizes.actor.size, steps=0, contexts=step.contexts, bytes_each=sizes.bytes_each
    )
