"""Loads the models of a PPO run and estimates their memory."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.assemble.algorithm import (
    Horizon,
)
from ppo_ds.assemble.data import Inputs
from ppo_ds.assemble.downloads import models_to_download
from ppo_ds.assemble.layouts import choose_layouts
from ppo_ds.assemble.memory_estimate import BYTES, Estimate, Hardware, estimate
from ppo_ds.assemble.memory_estimate import FrozenModel as FrozenShape
from ppo_ds.assemble.memory_estimate import Models as Shapes
from ppo_ds.assemble.reward_models import RewardModels, build_reward
from ppo_ds.assemble.roles import build_actor, build_critic, build_reference, critic_start, ppo_needs
from ppo_ds.assemble.shared import loading, training_notes
from ppo_ds.config.schema import (
    Config,
    all_rewards,
    has_critic,
    reference_is_base,
    uses_reference,
)
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.download import download_weights
from ppo_ds.models.size import shape_of, with_value_head
from ppo_ds.run.stage import RunContext
from ppo_ds.types import Reward


@dataclass(frozen=True)
class Models:
    """The loaded models of a PPO run."""

    actor: HybridActor
    reference: FrozenModel | None  # None if nothing needs the KL to it
    reward: Reward
    eval_rewards: dict[str, Reward]  # by their names in eval.rewards
    reward_models: RewardModels  # the models of all rewards
    critic: TrainedModel | None  # None without a critic, and if the value head is on the actor
    critic_path: str | None  # path of the critic's initial weights
    ema: WeightCopy | None
    lagged: WeightCopy | None


def load_models(config: Config, context: RunContext, inputs: Inputs, length: Horizon) -> Models:
    """Loads the models, the reward last because it may share the critic's weights. A collective."""
    world, banner = context.world, context.banner
    needs = ppo_needs(
        inputs.tokenizer.id_bound,
        max(inputs.longest_prompt + config.sampling.max_new_tokens, inputs.longest_text),
    )
    download_weights(models_to_download(config), world)
    start = None
    if has_critic(config):
        start = critic_start(config, inputs.tokenizer)
    loading(context, "actor", config.actor.model.path, config.actor.model.revision)
    actor = build_actor(config, world, needs, length.actor, context.timer)
    reference = critic = None
    if uses_reference(config):
        loading(context, "reference", config.reference.model.path, config.reference.model.revision)
        reference = build_reference(config, world, needs, actor)
    if start is not None:
        loading(context, "critic", start.model.path, start.model.revision)
        critic = build_critic(config, start, world, needs, length.critic)
    banner.starting("loading the reward")
    load_frozen = RewardModels(world, banner.note)
    if critic is not None and start is not None:
        load_frozen.offer(critic, start, config)
    rewards = {
        key: build_reward(
            section,
            key=key,
            tokenizer=inputs.tokenizer,
            load_frozen=load_frozen,
            score_tokens=context.budgets.score,
            all_reduce_max=context.budgets.guard_collective(world.max_int),
            reduce=context.budgets.guard_collective(world.sum),
            should_stop=context.stop.should_stop,
            note=banner.note,
        )
        for key, section in all_rewards(config).items()
    }
    reward = rewards.pop("reward")
    eval_rewards = {key.removeprefix("eval.rewards."): built for key, built in rewards.items()}
    banner.note(*training_notes("ppo", "actor", config.actor, actor))
    if critic is not None:
        banner.note(*training_notes("ppo", "critic", config.critic, critic))
    banner.note(*choose_layouts(config, actor, reference, critic))
    ema = WeightCopy(actor) if config.actor.ema.decay is not None else None
    lagged = WeightCopy(actor) if config.algo.old_policy == "lagged" else None
    critic_path = start.model.path if start else None
    return Models(actor, reference, reward, eval_rewards, load_frozen, critic, critic_path, ema, lagged)


def estimate_memory(config: Config, hardware: Hardware, *, models: Models, inputs: Inputs) -> Estimate:
    """Estimates the memory of the run from its loaded models."""
    reference, critic = None, None
    if models.reference is not None and not reference_is_base(config):
        section = config.reference
        reference = FrozenShape(
            shape_of(models.reference.module.lm),
            BYTES[str(section.model.dtype)],
            section.zero.stage == 3,
            section.zero.offload_params,
        )
    if models.critic is not None:
        critic = shape_of(models.critic.module.model)
    actor = shape_of(models.actor.module.lm)
    if models.actor.module.value_head is not None:
        actor = with_value_head(actor)
    rewards = {
        model.key: FrozenShape(
            model.shape,
            BYTES[model.section.dtype],
            model.zero.stage == 3,
            model.zero.offload_params,
        )
        for model in models.reward_models.loaded
        if model.shape is not None
    }
    longest_text = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return estimate(
        config, Shapes(actor, critic, reference, rewards, longest_text), hardware, inputs.longest_prompt
    )
