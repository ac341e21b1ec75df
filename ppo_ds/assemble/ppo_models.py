"""Loads the models of a PPO run, and makes the choices that depend on all: layouts, generation memory."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.assemble.algorithm import Horizon
from ppo_ds.assemble.data import Inputs
from ppo_ds.assemble.downloads import models_to_download
from ppo_ds.assemble.reward_models import RewardModels, build_reward
from ppo_ds.assemble.roles import build_actor, build_critic, build_reference, critic_start, ppo_needs
from ppo_ds.assemble.shared import choose_layout, loading, training_notes
from ppo_ds.config.schema import (
    PPOConfig,
    all_rewards,
    decoded_rows,
    has_critic,
    reference_is_base,
    uses_reference,
)
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError
from ppo_ds.models.download import download_weights
from ppo_ds.models.size import shape_of, with_value_head
from ppo_ds.planning.ppo_memory import Models as Shapes
from ppo_ds.planning.ppo_memory import decoding_bytes, estimate
from ppo_ds.planning.run_memory import Estimate, Hardware
from ppo_ds.planning.run_memory import FrozenModel as FrozenShape
from ppo_ds.planning.vllm_memory import engine_memory, synced_bytes
from ppo_ds.run.stage import RunContext
from ppo_ds.tracking.banner import titled
from ppo_ds.types import Reward


@dataclass(frozen=True)
class Models:
    """The loaded models of a PPO run."""

    actor: HybridActor
    reference: FrozenModel | None  # None if nothing needs the KL to the reference
    reward: Reward
    eval_rewards: dict[str, Reward]  # by their names in eval.rewards
    reward_models: RewardModels  # the models of all rewards
    critic: TrainedModel | None  # None without a critic, and if the value head is on the actor
    critic_path: str | None  # path of the critic's initial weights
    copies: dict[str, WeightCopy]  # "ema": the average of the actor, "lagged": the old policy


def load_models(config: PPOConfig, context: RunContext, inputs: Inputs, length: Horizon) -> Models:
    """Loads the models, rewards last, since these may use the critic's weights. All ranks must call this."""
    world, banner = context.world, context.banner
    needs = ppo_needs(inputs.tokenizer.id_bound, inputs.longest_row(config.sampling.max_new_tokens))
    download_weights(models_to_download(config), world)
    start = critic_start(config, inputs.tokenizer) if has_critic(config) else None
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
            temperature=actor.module.temperature,
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
    needed = {"ema": config.actor.ema.decay is not None, "lagged": config.algo.old_policy == "lagged"}
    copies = {name: WeightCopy(actor) for name, needs_copy in needed.items() if needs_copy}
    critic_path = start.model.path if start else None
    return Models(actor, reference, reward, eval_rewards, load_frozen, critic, critic_path, copies)


def estimate_memory(config: PPOConfig, hardware: Hardware, *, models: Models, inputs: Inputs) -> Estimate:
    """Estimates the memory of the run from its loaded models."""
    reference, critic = None, None
    if models.reference is not None and not reference_is_base(config):
        section = config.reference
        shape = shape_of(models.reference.module.lm)
        reference = FrozenShape.of(shape, str(section.model.dtype), section.zero)
    if models.critic is not None:
        critic = shape_of(models.critic.module.model)
    actor = shape_of(models.actor.module.lm)
    if models.actor.module.value_head is not None:
        actor = with_value_head(actor)
    rewards = {
        model.key: FrozenShape.of(model.shape, model.section.dtype, model.zero)
        for model in models.reward_models.loaded
        if model.shape is not None
    }
    longest_text = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return estimate(
        config, Shapes(actor, critic, reference, rewards, longest_text), hardware, inputs.longest_prompt
    )


def choose_layouts(
    config: PPOConfig, actor: TrainedModel, reference: FrozenModel | None, critic: TrainedModel | None
) -> list[str]:
    """Chooses the layout of each model's forwards and returns lines for the start-up banner.

    Raises UserError if the ranks of memory.sequence_parallel cannot divide the tokens of a model's forward.
    All ranks must call this.
    """
    group, device = config.memory.sequence_parallel, actor.world.device
    layout = "packed" if group > 1 else config.memory.layout
    lines = choose_layout(layout, "actor", actor, device)
    if reference is not None:
        with reference.resident():
            lines += choose_layout(layout, "reference", reference, device)
    if critic is not None:
        lines += choose_layout(layout, "critic", critic, device)
    if group == 1:
        return lines
    models = {"actor": actor, "reference": reference, "critic": critic}
    problems = {name: model.module.why_not_divided(group) for name, model in models.items() if model}
    if found := [f"the {name}: {problem}" for name, problem in problems.items() if problem]:
        raise UserError(f"memory.sequence_parallel={group}: {'; '.join(found)}")
    return [*lines, titled("memory", f"{group} ranks divide the tokens of a forward; generation does not")]


def plan_generation(config: PPOConfig, actor: HybridActor, critic: TrainedModel | None) -> list[str]:
    """Plans the memory of generation and returns lines for the start-up banner.

    All ranks must call this once all models are in memory.
    """
    lm, on_gpu, zero = actor.module.lm, actor.world.device.type == "cuda", config.actor.zero
    shape, each = shape_of(lm), lm.dtype.itemsize
    length = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    engine = engine_memory(config, shape, each, length, on_gpu)
    if engine is None:
        rows = decoded_rows(config, actor.world.size)
        needed = decoding_bytes(config, shape, each, rows, length, on_gpu)
    else:
        synced = synced_bytes(shape, each, actor.zero_stage == 3)
        needed = max(engine.awake, engine.loading(synced))
    line = actor.plan_generation(
        generation_gather=zero.generation_gather,
        offload_states=zero.offload_states,
        decoding_bytes=needed,
        critic=critic,
    )
    return [line] if line else []
