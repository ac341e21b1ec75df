"""Choices of a PPO run that need all models in memory: layouts of forwards, memory of generation."""

from __future__ import annotations

from ppo_ds.assemble.shared import choose_layout
from ppo_ds.assemble.vllm_memory import asleep, engine_memory, synced_bytes
from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.size import shape_of
from ppo_ds.ops.memory import decode_bytes_bound, output_bytes, sampling_bytes
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
    line = actor.plan_generation(
        generation_gather=config.actor.zero.generation_gather,
        offload_states=config.actor.zero.offload_states,
        decoding_bytes=decoding_needs(config, actor),
        critic=critic,
    )
    return [line] if line else []


def decoding_needs(config: Config, actor: HybridActor) -> int:
    """Returns an upper bound of the bytes for decoding, with those of an inference engine's own weights."""
    memory, sampling, lm = config.memory, config.sampling, actor.module.lm
    shape, each, on_gpu = shape_of(lm), lm.dtype.itemsize, actor.world.device.type == "cuda"
    length = config.data.max_prompt_tokens + sampling.max_new_tokens
    engine = engine_memory(config, shape, each, length, on_gpu)
    if engine is not None:
        synced = synced_bytes(shape, each, actor.zero_stage == 3)
        return max(engine.awake, engine.loading(asleep(config, on_gpu), synced))
    rows, budget = rollout_size(config) // actor.world.size, int(memory.rollout_tokens)
    tokens = min(budget, rows * length)
    return decode_bytes_bound(
        shape,
        tokens,
        min(rows, max(1, tokens // sampling.max_new_tokens)),
        each,
        output_bytes(each, on_gpu) + sampling_bytes(sampling.top_k, sampling.top_p),
        prefill=None if config.rollout.backend == "hf" else min(budget, PREFILL_TOKENS),
    )
