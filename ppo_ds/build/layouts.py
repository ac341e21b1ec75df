"""Choices of a PPO run that need all models in memory: layouts of forwards, memory of generation."""

from __future__ import annotations

from ppo_ds.build.shared import choose_layout
from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.size import decoding_bytes
from ppo_ds.ops.memory import output_bytes, sampling_bytes
from ppo_ds.rollout.continuous_batch import PREFILL_TOKENS


def choose_layouts(
    config: Config, actor: TrainedModel, reference: FrozenModel | None, critic: TrainedModel | None
) -> list[str]:
    """Lets each model choose the layout of its forwards and returns warnings for the start-up banner.

    A collective.
    """
    layout, device = config.memory.layout, actor.world.device
    lines = choose_layout(layout, "actor", actor, device)
    if reference is not None:
        with reference.resident():
            lines += choose_layout(layout, "reference", reference, device)
    if critic is not None:
        lines += choose_layout(layout, "critic", critic, device)
    return lines


def plan_generation(config: Config, actor: HybridActor, critic: TrainedModel | None) -> list[str]:
    """Plans the memory of generation and returns lines for the start-up banner.

    A collective, called once all models are in memory.
    """
    zero, sampling, most = config.actor.zero, config.sampling, config.sampling.max_new_tokens
    output = output_bytes(actor.module.lm.dtype.itemsize, actor.world.device.type == "cuda")
    rows = rollout_size(config) // actor.world.size
    tokens = min(int(config.memory.rollout_tokens), rows * (config.data.max_prompt_tokens + most))
    line = actor.plan_generation(
        generation_gather=zero.generation_gather,
        offload_states=zero.offload_states,
        decoding_bytes=decoding_bytes(
            actor.module.lm,
            tokens,
            min(rows, max(1, tokens // most)),
            output + sampling_bytes(sampling.top_k, sampling.top_p),
            prefill=None
            if config.rollout.backend == "hf"
            else min(int(config.memory.rollout_tokens), PREFILL_TOKENS),
        ),
        critic=critic,
    )
    return [line] if line else []
