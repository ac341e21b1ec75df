"""Choices made once all models are in memory: layouts of forwards and the memory of generation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.models.size import decoding_bytes


def choose_layouts(
    config: Config, actor: TrainedModel, reference: FrozenModel | None, critic: TrainedModel | None
) -> list[str]:
    """Lets each model choose the layout of its forwards and returns warnings for the start-up banner.

    A collective.
    """
    layout, device, lines = config.memory.layout, actor.world.device, []
    models: list[tuple[str, Any, AbstractContextManager[None]]] = [("actor", actor, nullcontext())]
    if reference is not None:
        models.append(("reference", reference, reference.resident()))
    if critic is not None:
        models.append(("critic", critic, nullcontext()))
    for name, model, resident in models:
        with resident:
            choice = model.module.choose_layout(layout, device, model)
        if choice.packed and not choice.kernel and device.type == "cuda":
            lines.append(
                f"warning    memory.layout=packed: no kernel supports the {name}'s heads: attention is "
                "computed one sequence after the other"
            )
        if choice.reason is not None:
            lines.append(f"warning    memory.layout={layout}: the {name}'s rows are padded: {choice.reason}")
    return lines


def plan_generation(config: Config, actor: HybridActor, critic: TrainedModel | None) -> list[str]:
    """Plans the memory of generation and returns lines for the start-up banner.

    A collective, called once all models are in memory.
    """
    zero, most = config.actor.zero, config.sampling.max_new_tokens
    rows = rollout_size(config) // actor.world.size
    tokens = min(config.memory.rollout_tokens, rows * (config.data.max_prompt_tokens + most))
    line = actor.plan_generation(
        generation_gather=zero.generation_gather,
        offload_states=zero.offload_states,
        decoding_bytes=decoding_bytes(actor.module.lm, tokens, min(rows, max(1, tokens // most))),
        critic=critic,
    )
    return [line] if line else []


def adapter_notes(config: Config, actor: TrainedModel, critic: TrainedModel | None) -> list[str]:
    """Returns the numbers of trained parameters of models with LoRA, for the start-up banner."""
    trained = [("actor", config.actor.lora, actor)]
    if critic is not None:
        trained.append(("critic", config.critic.lora, critic))
    lines = []
    for name, lora, model in trained:
        if lora.rank:
            n, m = parameter_counts(model.module)
            lines.append(
                f"lora       {name}: rank {lora.rank}, trainable parameters: {n:,} of {m:,} ({n / m:.2%})"
            )
    return lines
