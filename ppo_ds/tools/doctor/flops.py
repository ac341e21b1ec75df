"""Estimates the FLOPs of a step from the config and the shapes of the models."""

from __future__ import annotations

from ppo_ds.compute.sizes import Shape, causal_pairs, forward_flops
from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.config.sections.models import InheritedModelConfig, ModelConfig
from ppo_ds.planning.ppo_memory import Models


def step_flops(config: Config, models: Models, longest_prompt: int | None = None) -> int:
    """Computes the FLOPs of one PPO step over all ranks, with prompts and responses of maximum length.

    A backward pass counts as two forward passes, or as three with gradient checkpointing.
    """
    prompt = longest_prompt or config.data.max_prompt_tokens
    rows, response = rollout_size(config), config.sampling.max_new_tokens
    length = prompt + response

    def forward(shape: Shape) -> int:
        return forward_flops(shape, rows * length, rows * causal_pairs([length]), rows * response)

    trained: list[tuple[Shape, ModelConfig | InheritedModelConfig]] = [(models.actor, config.actor.model)]
    if models.critic is not None:
        trained.append((models.critic, config.critic.model))
    frozen = [model.shape for model in (models.reference, *models.rewards.values()) if model is not None]
    generation = forward(models.actor)
    scoring = sum(forward(shape) for shape in (*(shape for shape, _ in trained), *frozen))
    epoch = sum(forward(shape) * (4 if model.gradient_checkpointing else 3) for shape, model in trained)
    return generation + scoring + config.algo.epochs * epoch
