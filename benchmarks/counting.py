"""What a training run did and what that must cost: recorded from the trainer's own objects while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ppo_ds.ops.flops import causal_pairs, decode_bytes, forward_flops
from ppo_ds.training.performance import UpdateCost


@dataclass(frozen=True)
class Lengths:
    """Of one step's answers, over all ranks."""

    prompts: list[int]
    responses: list[int]

    @property
    def totals(self) -> list[int]:
        return [p + r for p, r in zip(self.prompts, self.responses, strict=True)]

    @property
    def decode_steps(self) -> int:
        """Forwards of one token for each row that all rows together need, the first token coming from the prompt's forward."""
        return max(self.responses) - 1

    @property
    def contexts(self) -> int:
        """Cached places that those forwards read, summed over rows."""
        return sum(
            causal_pairs([total - 1]) - causal_pairs([prompt])
            for prompt, total in zip(self.prompts, self.totals, strict=True)
        )


@dataclass
class Recorder:
    """Stands in the place of a trainer's ``collect`` and notes the lengths of what came, and the process's CPU seconds at each step's start."""

    stage: Any
    steps: list[Lengths] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._collect, self.stage.collect = self.stage.collect, self

    def __call__(self, prompts: Any) -> Any:
        self.cpu.append(time.process_time())
        rollout, metrics = self._collect(prompts)
        mine = (rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist())
        shares = self.stage.context.world.gather_objects(mine)
        self.steps.append(Lengths([n for p, _ in shares for n in p], [n for _, r in shares for n in r]))
        return rollout, metrics


@dataclass(frozen=True)
class Sizes:
    """Of the models that a run has; ``bytes_each``: of a weight that decodes."""

    actor: UpdateCost
    critic: UpdateCost | None
    bytes_each: int


def sizes(stage: Any) -> Sizes:
    """Those that the run's own perf/* count with."""
    meter = stage.meter
    return Sizes(meter.actor, meter.critic, meter.weight_bytes)


def phase_flops(sizes: Sizes, step: Lengths, epochs: float) -> dict[str, float]:
    """FLOPs that each timed phase of one step cannot do without, over all ranks; the head at the places of a response only.

    ``epochs``: that the step's updates ran, policy/epochs_run of its metrics. The reward model is taken to be of the critic's size,
    as it is in the workloads.
    """
    tokens, pairs, places = sum(step.totals), causal_pairs(step.totals), sum(step.responses)
    read = [total - 1 for total in step.totals]  # the last token of an answer is drawn, not read
    actor = forward_flops(sizes.actor.size, tokens, pairs, places)
    found = {
        "time/generate": forward_flops(sizes.actor.size, sum(read), causal_pairs(read), places),
        "time/old_logprobs": actor,
        "time/ref_logprobs": actor,
        "time/update_actor": epochs * sizes.actor.forwards * actor,
    }
    if sizes.critic is not None:
        critic = forward_flops(sizes.critic.size, tokens, pairs, places)
        found |= {
            "time/values": critic,
            "time/reward": critic,
            "time/update_critic": epochs * sizes.critic.forwards * critic,
        }
    return found


def decode_traffic(sizes: Sizes, step: Lengths, ranks: int) -> int:
    """Bytes that generation must read, over all ranks: each rank's weights once for each decode step, as if all its rows were decoded together."""
    weights = decode_bytes(
        sizes.actor.size, steps=ranks * step.decode_steps, contexts=0, bytes_each=sizes.bytes_each
    )
    return weights + decode_bytes(
        sizes.actor.size, steps=0, contexts=step.contexts, bytes_each=sizes.bytes_each
    )
