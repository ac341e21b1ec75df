"""Builds the held-out evaluation of PPO: its rewards, and the reference of the win rate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from ppo_ds.assemble.data import Inputs
from ppo_ds.assemble.multi_turn import with_environment
from ppo_ds.assemble.ppo_models import Models
from ppo_ds.background.pending import PeerTaskFailed, call
from ppo_ds.background.user_code import user_traceback
from ppo_ds.config.schema import PPOConfig, reference_is_base, rollout_size, uses_reference
from ppo_ds.data.prompts import eval_batches
from ppo_ds.errors import RunError
from ppo_ds.ppo.collector import StartScoring
from ppo_ds.ppo.evaluation import Evaluator
from ppo_ds.ppo.win_rate import FILE, ReferenceResponses
from ppo_ds.rewards.base import start_scoring
from ppo_ds.rewards.processes import FunctionRaised
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.run.stage import HELD_OUT, TRAIN_PROMPTS, RunContext
from ppo_ds.run.stopping import StepRefused
from ppo_ds.secrets import censored
from ppo_ds.types import Prompts, Reward, Rollout

log = logging.getLogger(__name__)


def guarded_scoring(context: RunContext, models: Models, start: StartScoring) -> StartScoring:
    """Wraps ``start``: if memory runs out, scoring is repeated; after other errors, all ranks end the run.

    With sharded reward models, scoring is not repeated: any error of ``start`` on one rank ends the run at
    once, because other ranks wait in a collective.
    """
    world = context.world

    def refuse(error: BaseException | None) -> StepRefused:
        own = None if error is None or isinstance(error, PeerTaskFailed) else describe_failure(error)
        found = world.gather_objects(own)
        return StepRefused("reward_error", next(text for text in found if text is not None))

    guard = partial(context.budgets.guard, context.budgets.score, what="the reward", refuse=refuse)
    guarded = guard(
        start,
        repeatable=not models.reward_models.sharded,
        # the repetition starts background rewards again
        discard=lambda pending: pending.cancel(),
    )
    agree = guard(call, repeatable=True)
    return lambda rollout: replace(guarded(rollout), agree=agree)


def describe_failure(error: BaseException) -> str:
    """Describes an error of a reward in one line; logs the traceback if user code raised it."""
    if isinstance(error, RunError):
        return str(error)
    trace = error.trace if isinstance(error, FunctionRaised) else user_traceback(error)
    log.error("traceback of the reward:\n%s", censored(trace).rstrip())
    line = error.line if isinstance(error, FunctionRaised) else f"{type(error).__name__}: {error}"
    return ", ".join([line.partition("\n")[0], *getattr(error, "__notes__", ())])


def build_evaluator(
    config: PPOConfig,
    context: RunContext,
    inputs: Inputs,
    models: Models,
    generator: Generator,
    sampling: SamplingParams,
) -> Evaluator | None:
    """Builds the evaluation on the held-out prompts, or without these on eval.train_prompts training prompts.

    Returns None if there are neither.
    """
    held_out, world = inputs.held_out is not None, context.world
    if not held_out and not config.eval.train_prompts:
        return None

    def scoring(reward: Reward) -> StartScoring:
        if isinstance(reward, WeightedReward):
            return guarded_scoring(context, models, reward.start_evaluation)
        return guarded_scoring(context, models, partial(start_scoring, reward))

    decoding = sampling.as_greedy() if config.eval.greedy else sampling
    return Evaluator(
        eval_batches(
            inputs.held_out or inputs.source,
            rank=world.rank,
            world_size=world.size,
            rows_per_batch=rollout_size(config) // world.size,
            max_prompts=config.eval.max_prompts if held_out else config.eval.train_prompts,
        ),
        actor=models.actor,
        generator=generator,
        start_scoring=scoring(models.reward),
        more_scoring={name: scoring(reward) for name, reward in models.eval_rewards.items()},
        sampling=decoding,
        correct_above=config.eval.correct_above,
        reference=reference_responses(config, context, inputs, models, decoding)
        if config.eval.win_rate and held_out
        else None,
        tokenizer=inputs.tokenizer,
        world=world,
        check=context.stop.raise_if_stopped,
        data=HELD_OUT if held_out else TRAIN_PROMPTS,
        by=config.eval.by,
    )


def reference_responses(
    config: PPOConfig, context: RunContext, inputs: Inputs, models: Models, sampling: SamplingParams
) -> ReferenceResponses:
    """Builds the source of the reference's responses for the win rate.

    If no separate reference model is loaded, the reference is the initial actor. Its responses are then those
    of the first evaluation.
    """
    actor, section, reference = config.actor.model, config.reference.model, models.reference
    loaded = uses_reference(config) and not reference_is_base(config)
    sharded, generate = config.reference.zero.stage == 3, None

    def rollouts(batches: Sequence[Prompts]) -> list[Rollout]:
        """Generates the reference's responses to ``batches``. All ranks must call this."""
        assert reference is not None
        with reference.decoding() as lm:
            backend = HFGenerator(
                lambda: lm,
                tokenizer=inputs.tokenizer,
                token_budget=int(context.budgets.rollout),
                lockstep_max=context.world.max_int if sharded else None,
                should_stop=context.stop.should_stop,
            )
            check = context.stop.raise_if_stopped
            generator = with_environment(config, context.world, inputs.tokenizer, backend, check)
            return [generator(prompts, sampling) for prompts in batches]

    if loaded and reference is not None:
        generate = context.budgets.guard(
            context.budgets.rollout,
            rollouts,
            what="generation with the reference",
            repeatable=not sharded and config.rollout.environment.path is None,
        )
    path = section.path if loaded else actor.path
    settings = config.rollout.environment
    environment = {"environment": settings.model_dump()} if settings.path else {}
    resume = config.run.resume
    return ReferenceResponses(
        file=context.run_dir / FILE,
        earlier=None if resume in ("auto", "never", "restart") else Path(resume).parent.parent / FILE,
        settings={
            "reference": str(path).removeprefix(f"{config.run.dir}/"),
            "revision": section.revision if loaded else actor.revision,
            "sampling": asdict(sampling),
            **environment,
            "reward": config.reward,
        },
        world=context.world,
        is_initial_actor=not loaded or (section.path, section.revision) == (actor.path, actor.revision),
        generate=generate,
    )
