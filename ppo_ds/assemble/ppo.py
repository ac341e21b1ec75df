"""Builds the PPO stage from its config."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ppo_ds.algorithm.kl.controllers import FixedKLController
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.assemble.algorithm import (
    experience_maker,
    horizon,
    kept_forwards,
    kl_controller,
    learner,
    masked_stop_ids,
    parity_monitor,
)
from ppo_ds.assemble.banner import summary
from ppo_ds.assemble.data import Inputs, read_inputs, stop_ids
from ppo_ds.assemble.evaluation import build_evaluator, guarded_scoring
from ppo_ds.assemble.generator import build_generator, rebuilt_on_change, settle_old_logprobs
from ppo_ds.assemble.multi_turn import try_on_data, with_environment
from ppo_ds.assemble.ppo_models import Models, estimate_memory, load_models, plan_generation
from ppo_ds.assemble.preflight import preflight, try_functions
from ppo_ds.assemble.shared import slow_dtypes
from ppo_ds.config.schema import PPOConfig, all_rewards
from ppo_ds.config.sections.algo import AlgoConfig
from ppo_ds.config.warnings import warnings
from ppo_ds.distributed.world import seed_everything
from ppo_ds.planning.budgets import settle
from ppo_ds.planning.forwards import kept_roles
from ppo_ds.ppo.collector import DynamicRolloutCollector, GreedyRolloutCollector, RolloutCollector
from ppo_ds.ppo.health import Gap, KLMonitor
from ppo_ds.ppo.meter import build_meter
from ppo_ds.ppo.partial_rollouts import PartialRolloutCollector
from ppo_ds.ppo.trainer import PPOTrainer
from ppo_ds.rewards.base import start_scoring
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.rollout.keys import PartialRollouts
from ppo_ds.run.stage import RunContext, Stateful
from ppo_ds.tracking.banner import titled
from ppo_ds.types import Reward

# difference between the sampling seeds of consecutive ranks; a large prime, to avoid equal seeds
RANK_SEED_OFFSET = 100_003


def build_ppo(config: PPOConfig, context: RunContext) -> PPOTrainer:
    """Loads data and models and builds the PPO stage. May raise UserError. All ranks must call this."""
    world, banner = context.world, context.banner

    # data and models
    inputs, stops = read_data(config, context)
    length = horizon(config, len(inputs.source))
    models = load_models(config, context, inputs, length)
    config = settle(config, context, partial(estimate_memory, models=models, inputs=inputs))
    banner.note(*plan_generation(config, models.actor, models.critic))
    sampling = build_sampling(config, stops, models.actor.module.temperature)
    generator, gap = generation(config, context, inputs, models, sampling)
    config = settle_old_logprobs(config, gap, world.size)
    if roles := " and ".join(kept_roles(config)):
        banner.note(titled("memory", f"{roles}: the forward before the update serves for the update"))
    banner.summarize(
        *summary(config, world, inputs.source, models.critic_path, length.steps, length.actor, gap)
    )

    # algorithm; from here on each rank draws its own random numbers
    seed_everything(config.run.seed + RANK_SEED_OFFSET * (world.rank + 1))
    kept = kept_forwards(config, world=world, actor=models.actor, critic=models.critic)
    make_experience = experience_maker(
        config,
        context,
        actor=models.actor,
        reference=models.reference,
        critic=models.critic,
        lagged=models.copies.get("lagged"),
        masked_stop_ids=masked_stop_ids(config.algo.train_on_eos, stops, inputs.tokenizer.pad_id),
        kept=kept,
    )
    learn = learner(
        config,
        replace(context, report=make_experience.print_step) if config.tracker.print_updates else context,
        actor=models.actor,
        critic=models.critic,
        parity=parity_monitor(config),
        ptx_texts=inputs.ptx,
        ema=models.copies.get("ema"),
        kept=kept,
    )
    kl, collect = kl_controller(config), build_collector(config, context, inputs, models, generator, sampling)
    return PPOTrainer(
        context=context,
        config=config,
        total_steps=length.steps,
        data=inputs.fingerprints,
        tokenizer=inputs.tokenizer,
        weight_copies=models.copies,
        collect=collect,
        make_experience=make_experience,
        learn=learn,
        kl=kl,
        stateful=stateful_components(config.algo, inputs, models.reward, kl, make_experience.shaper, collect),
        evaluator=build_evaluator(config, context, inputs, models, generator, sampling),
        meter=build_meter(world, models.actor, models.critic),
        kl_monitor=KLMonitor(config.health.max_kl, stops=config.health.kl_action == "stop"),
    )


def generation(
    config: PPOConfig, context: RunContext, inputs: Inputs, models: Models, sampling: SamplingParams
) -> tuple[Generator, Gap]:
    """Builds the generator: the decode backend, wrapped in the environment if there is one.

    Also returns the gap between the backend's log-probs and those of training. All ranks must call this.
    """
    world, stop, budgets = context.world, context.stop, context.budgets
    context.banner.starting("comparing the log-probs of generation and training")
    backend, gap, make_backend = build_generator(
        config, world, inputs, models.actor, sampling, stop.should_stop, context.banner.note
    )
    generator = budgets.guard(
        budgets.rollout,
        rebuilt_on_change(backend, make_backend, budgets.rollout),
        what="generation",
        repeatable=not (models.actor.lockstep or config.rollout.own_weights),
    )
    return with_environment(config, world, inputs.tokenizer, generator, stop.raise_if_stopped), gap


def read_data(config: PPOConfig, context: RunContext) -> tuple[Inputs, tuple[int, ...]]:
    """Reads the data, checks that models and rewards can use it, and returns it with the end tokens' ids.

    Adds descriptions and warnings to the start-up banner. May raise UserError. All ranks must call this.
    """
    context.banner.starting("reading and tokenizing the data")
    inputs, note = read_inputs(config, context.world), context.banner.note
    stops = stop_ids(config, inputs.tokenizer)
    preflight(config, inputs, context.world.device.type == "cuda")
    # on one rank only, since user code may have side effects
    context.world.on_all(lambda: try_user_code(config, inputs) if context.world.is_main else None)
    hides_stops = bool(masked_stop_ids(config.algo.train_on_eos, stops, inputs.tokenizer.pad_id))
    note(
        *inputs.notes(config.eval.max_prompts),
        *warnings(config, hides_stops=hides_stops),
        *slow_dtypes(config, context.world),
    )
    return inputs, stops


def try_user_code(config: PPOConfig, inputs: Inputs) -> None:
    """Calls reward functions and the environment once, and raises UserError if a call fails."""
    try_functions(all_rewards(config), inputs)
    try_on_data(config, inputs)


def stateful_components(
    algo: AlgoConfig,
    inputs: Inputs,
    reward: Reward,
    kl: FixedKLController,
    shaper: ScoreShaper,
    collect: RolloutCollector,
) -> dict[str, Stateful]:
    """Returns the components whose state a checkpoint saves, by name."""
    components: dict[str, Stateful | None] = {
        # the coefficient of a fixed controller comes from the config, also after a resume
        "kl": kl if algo.kl.controller != "fixed" else None,
        "prompts": inputs.prompts,
        "difficulty": inputs.prompts.difficulty,
        "scores": shaper,
        # a user's reward may have a state
        "reward": reward if isinstance(reward, Stateful) else None,
        "ptx": inputs.ptx,
        "partial": collect if isinstance(collect, PartialRolloutCollector) else None,
    }
    return {name: component for name, component in components.items() if component is not None}


def build_sampling(config: PPOConfig, stops: tuple[int, ...], temperature: float) -> SamplingParams:
    """Builds the sampling parameters; ``temperature`` is that of the policy's log-probs."""
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


def build_collector(
    config: PPOConfig,
    context: RunContext,
    inputs: Inputs,
    models: Models,
    generator: Generator,
    sampling: SamplingParams,
) -> RolloutCollector:
    dynamic, samples = config.algo.dynamic_sampling, config.rollout.samples_per_prompt
    components: dict[str, Any] = {
        "prompts": inputs.prompts,
        "actor": models.actor,
        "generator": generator,
        "start_scoring": guarded_scoring(context, models, partial(start_scoring, models.reward)),
        "sampling": sampling,
        "timer": context.timer,
        "check": context.stop.raise_if_stopped,
        "difficulty": inputs.prompts.difficulty,
    }
    if config.algo.advantage.needs_greedy:
        return GreedyRolloutCollector(group_size=samples, world=context.world, **components)
    if isinstance(config.rollout, PartialRollouts) and config.rollout.partial:
        return PartialRolloutCollector(
            section=config.rollout, tokenizer=inputs.tokenizer, world=context.world, **components
        )
    if not dynamic.enabled:
        return RolloutCollector(**components)
    return DynamicRolloutCollector(
        group_size=samples, max_rounds=dynamic.max_rounds, world=context.world, **components
    )
