"""Builds the PPO stage from its config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ppo_ds.build.algorithm import (
    Horizon,
    experience_maker,
    horizon,
    kl_controller,
    learner,
    masked_stop_ids,
    pretraining,
)
from ppo_ds.build.banner import summary
from ppo_ds.build.data import Inputs, read_inputs, stop_ids
from ppo_ds.build.downloads import models_to_download
from ppo_ds.build.generator import build_generator, rebuilt_on_change
from ppo_ds.build.layouts import choose_layouts, plan_generation
from ppo_ds.build.memory_estimate import BYTES, Estimate, Hardware, estimate
from ppo_ds.build.memory_estimate import FrozenModel as FrozenShape
from ppo_ds.build.memory_estimate import Models as Shapes
from ppo_ds.build.preflight import preflight
from ppo_ds.build.reward_models import RewardModels, build_reward
from ppo_ds.build.roles import build_actor, build_critic, build_reference, critic_start, ppo_needs
from ppo_ds.build.shared import adapter_note, eval_weights, slow_dtypes
from ppo_ds.build.token_budgets import settle
from ppo_ds.config.schema import (
    Config,
    all_rewards,
    has_critic,
    reference_is_base,
    rollout_size,
    uses_reference,
)
from ppo_ds.config.sections.algo import AlgoConfig
from ppo_ds.config.warnings import warnings
from ppo_ds.data.prompts import eval_batches
from ppo_ds.distributed.world import seed_everything
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.download import download_weights
from ppo_ds.models.size import shape_of, with_value_head
from ppo_ds.ops.kl import FixedKLController
from ppo_ds.ppo.collector import DynamicRolloutCollector, RolloutCollector
from ppo_ds.ppo.evaluation import Evaluator
from ppo_ds.ppo.health import KLMonitor
from ppo_ds.ppo.meter import build_meter
from ppo_ds.ppo.reward_shaping import ScoreShaper
from ppo_ds.ppo.scoring import StartScoring
from ppo_ds.ppo.trainer import PPOTrainer
from ppo_ds.rewards.pending import start_scoring
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.training.stage import RunContext, Stateful
from ppo_ds.types import Reward

# difference between the sampling seeds of consecutive ranks; a large prime, so that other seeds differ
RANK_SEED_OFFSET = 100_003


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


def build_ppo(config: Config, context: RunContext) -> PPOTrainer:
    """Loads data and models and builds the PPO stage from them. May raise UserError. A collective."""
    world, banner, algo = context.world, context.banner, config.algo

    # data and models
    inputs, stops = read_data(config, context)
    length = horizon(config, len(inputs.source))
    models = load_models(config, context, inputs, length)
    config = settle(config, context, partial(estimate_memory, models=models, inputs=inputs))
    banner.note(*plan_generation(config, models.actor, models.critic))
    sampling = build_sampling(config, stops, models.actor.module.temperature)
    backend, gap, make_backend = build_generator(
        config, world, inputs, models.actor, sampling, context.stop.should_stop, banner.note
    )
    generator = context.budgets.guard(
        context.budgets.rollout,
        rebuilt_on_change(backend, make_backend, context.budgets.rollout),
        what="generation",
        repeatable=not models.actor.lockstep,
    )
    banner.summarize(
        *summary(config, world, inputs.source, models.critic_path, length.steps, length.actor, gap)
    )

    # algorithm; from here on each rank draws its own random numbers
    seed_everything(config.run.seed + RANK_SEED_OFFSET * (world.rank + 1))
    make_experience = experience_maker(
        config,
        world=world,
        actor=models.actor,
        reference=models.reference,
        critic=models.critic,
        lagged=models.lagged,
        stop_token_ids=stops,
        pad_id=inputs.tokenizer.pad_id,
        budgets=context.budgets,
        timer=context.timer,
        check=context.stop.raise_if_stopped,
    )
    learn = learner(
        config,
        world=world,
        actor=models.actor,
        critic=models.critic,
        ptx_texts=inputs.ptx,
        ema=models.ema,
        timer=context.timer,
        health=context.health,
    )
    kl = kl_controller(config)
    return PPOTrainer(
        context=context,
        algo=algo,
        seed=config.run.seed,
        total_steps=length.steps,
        samples_per_prompt=config.rollout.samples_per_prompt,
        sample_rows=config.tracker.samples,
        logs_histograms=config.tracker.logs_histograms,
        actor=models.actor,
        critic=models.critic,
        ema=models.ema,
        lagged=models.lagged,
        prompts=inputs.prompts,
        collect=build_collector(config, context, models, generator, sampling),
        make_experience=make_experience,
        make_pretraining_experience=pretraining(config, make_experience)
        if algo.value.pretrain_rollouts
        else None,
        learn=learn,
        kl=kl,
        stateful=stateful_components(algo, inputs, models.reward, kl, make_experience.shaper),
        evaluator=build_evaluator(config, context, inputs, models, generator, sampling),
        eval_weights=eval_weights(models.ema, config.actor.ema.evaluate),
        tokenizer=inputs.tokenizer,
        meter=build_meter(world, models.actor, models.critic),
        kl_monitor=KLMonitor(config.health.max_kl, stops=config.health.kl_action == "stop"),
    )


def read_data(config: Config, context: RunContext) -> tuple[Inputs, tuple[int, ...]]:
    """Reads the data, checks that models and rewards can work with it, and returns it with the end tokens.

    Adds descriptions and warnings to the start-up banner. May raise UserError.
    """
    inputs, note = read_inputs(config, context.world), context.banner.note
    stops = stop_ids(config, inputs.tokenizer)
    preflight(config, inputs)
    hides_stops = bool(masked_stop_ids(config.algo.train_on_eos, stops, inputs.tokenizer.pad_id))
    note(*inputs.notes(), *warnings(config, hides_stops=hides_stops), *slow_dtypes(config, context.world))
    return inputs, stops


def stateful_components(
    algo: AlgoConfig, inputs: Inputs, reward: Reward, kl: FixedKLController, shaper: ScoreShaper
) -> dict[str, Stateful]:
    """Returns the components whose state a checkpoint saves, by name."""
    components: dict[str, Stateful | None] = {
        # the coefficient of a fixed controller is read from the config, even after a resume
        "kl": kl if algo.kl.controller != "fixed" else None,
        "prompts": inputs.prompts,
        "scores": shaper,
        # a user's own reward may have a state
        "reward": reward if isinstance(reward, Stateful) else None,
        "ptx": inputs.ptx,
    }
    return {name: component for name, component in components.items() if component is not None}


def build_sampling(config: Config, stops: tuple[int, ...], temperature: float) -> SamplingParams:
    """Builds the sampling parameters; ``temperature`` is the one that the policy's log-probs use."""
    sampling = config.sampling
    return SamplingParams(
        sampling.max_new_tokens,
        sampling.min_new_tokens,
        temperature,
        sampling.top_p,
        sampling.top_k,
        stops,
        tuple(sampling.stop),
    )


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
    actor = build_actor(config, world, needs, length.actor, context.timer)
    reference = build_reference(config, world, needs, actor) if uses_reference(config) else None
    critic = build_critic(config, start, world, needs, length.critic) if start else None
    load_frozen = RewardModels(world, banner.note)
    if critic is not None:
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
    banner.note(*adapter_note("actor", config.actor.lora, actor))
    if critic is not None:
        banner.note(*adapter_note("critic", config.critic.lora, critic))
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


def build_collector(
    config: Config, context: RunContext, models: Models, generator: Generator, sampling: SamplingParams
) -> RolloutCollector:
    dynamic = config.algo.dynamic_sampling
    components: dict[str, Any] = {
        "actor": models.actor,
        "generator": generator,
        "start_scoring": guarded_scoring(context, models, partial(start_scoring, models.reward)),
        "sampling": sampling,
        "timer": context.timer,
        "check": context.stop.raise_if_stopped,
    }
    if not dynamic.enabled:
        return RolloutCollector(**components)
    return DynamicRolloutCollector(
        group_size=config.rollout.samples_per_prompt,
        max_rounds=dynamic.max_rounds,
        world=context.world,
        **components,
    )


def guarded_scoring(context: RunContext, models: Models, start: StartScoring) -> StartScoring:
    """Wraps the start of scoring, in which reward models run, so that it is repeated if memory runs out."""
    return context.budgets.guard(
        context.budgets.score,
        start,
        what="the reward",
        repeatable=not models.reward_models.sharded,
        # the repetition starts rewards in the background again
        discard=lambda pending: pending.cancel(),
    )


def build_evaluator(
    config: Config,
    context: RunContext,
    inputs: Inputs,
    models: Models,
    generator: Generator,
    sampling: SamplingParams,
) -> Evaluator | None:
    if inputs.held_out is None:
        return None
    world = context.world

    def scoring(reward: Reward) -> StartScoring:
        start = (
            reward.start_evaluation if isinstance(reward, WeightedReward) else partial(start_scoring, reward)
        )
        return guarded_scoring(context, models, start)

    return Evaluator(
        eval_batches(
            inputs.held_out,
            rank=world.rank,
            world_size=world.size,
            rows_per_batch=rollout_size(config) // world.size,
            max_prompts=config.eval.max_prompts,
        ),
        actor=models.actor,
        generator=generator,
        start_scoring=scoring(models.reward),
        more_scoring={name: scoring(reward) for name, reward in models.eval_rewards.items()},
        sampling=sampling.as_greedy() if config.eval.greedy else sampling,
        correct_above=config.eval.correct_above,
        tokenizer=inputs.tokenizer,
        world=world,
        check=context.stop.raise_if_stopped,
    )
