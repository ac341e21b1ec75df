"""Config to objects: the only place where the parts are wired together."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ppo_ds.algo.evaluation import Evaluator
from ppo_ds.algo.experience import AdvantageShape, ExperienceMaker, RewardShape
from ppo_ds.algo.folder import RunFolder
from ppo_ds.algo.learner import Learner, PolicyObjective, ValueObjective
from ppo_ds.algo.parity import GATE_PROMPTS, parity_gate
from ppo_ds.algo.stopping import StopRequest
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.algo.trainer import Plan, Trainer
from ppo_ds.banner import banner
from ppo_ds.config import Config, resolved, rollout_size
from ppo_ds.data.prompts import PromptSource, PromptStream, eval_batches
from ppo_ds.engine.checkpoint import Checkpoints
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.world import World, connect, seed_everything
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.ops.kl import AdaptiveKLController, FixedKLController, ThresholdKLController
from ppo_ds.roles import Needs, build_actor, build_critic, build_reference, critic_start, placed
from ppo_ds.rollout.base import Sampling
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.targets import bind
from ppo_ds.tracking.console import ConsoleTracker
from ppo_ds.tracking.jsonl import JsonlTracker
from ppo_ds.tracking.tracker import Tracker, Trackers
from ppo_ds.tracking.wandb import WandbTracker
from ppo_ds.types import Reward

RANK_SEED_OFFSET = 100_003  # a prime: ranks sample from streams that no seed of another run starts


def build_trainer(config: Config) -> Trainer:
    """Everything of a run, loaded and checked, resumed where it left off. Raises UserError for what the user can mend. A collective."""
    make_reward = bind(config.reward, "reward")
    prepare = bind(config.prepare, "prepare") if config.prepare else None
    world = connect(config.run.timeout_minutes, config.run.verbose)
    _check_device(config, world)
    run_dir = Path(config.run.dir or "")
    _on_main(world, lambda: _open_run_directory(run_dir, config))
    if prepare:
        _on_main(world, prepare)
    seed_everything(config.run.seed)

    tokenizer = _tokenizer(config)
    source = _source(config, tokenizer, config.data.path, config.data.split, "data.path", config.data.max_samples)
    held_out = _source(config, tokenizer, config.data.eval_path, config.data.eval_split, "data.eval_path", None) if config.data.eval_path else None
    prompts = _stream(config, world, source)
    longest = max(source.longest, held_out.longest if held_out else 0)
    needs = Needs(tokenizer.vocab_size, longest + config.sampling.max_new_tokens)
    steps = config.run.steps or math.ceil((config.run.epochs or 0) * len(source) / config.rollout.prompts_per_step)
    optimizer_steps = steps * _optimizer_steps_per_step(config)

    timer = PhaseTimer(world.device)
    actor = build_actor(config, world, needs, optimizer_steps, timer)
    reference = build_reference(config, world, needs)
    reward = make_reward(
        tokenizer=tokenizer,
        place=lambda load, zero, dtype: placed(load, zero, dtype, world),
        agree=world.max_int,
        score_tokens=config.memory.score_tokens,
    )
    start = critic_start(config, tokenizer)
    critic = build_critic(config, start, world, needs, optimizer_steps)

    sampling = _sampling(config, tokenizer)
    generator = HFGenerator(lambda: actor.lm, tokenizer=tokenizer, token_budget=config.memory.rollout_tokens)
    few = source.batch([(world.rank + i) % len(source) for i in range(GATE_PROMPTS)])
    gap = parity_gate(
        few, actor=actor, generator=generator, sampling=sampling, dtype=config.actor.model.dtype, token_budget=config.memory.score_tokens
    )
    seed_everything(config.run.seed + RANK_SEED_OFFSET * (world.rank + 1))
    trainer = Trainer(
        world=world,
        actor=actor,
        critic=critic,
        prompts=prompts,
        generator=generator,
        sampling=sampling,
        make_experience=_experience_maker(config, world, actor, reference, critic, reward, timer),
        learn=_learner(config, world, actor, critic, timer),
        kl=_kl_controller(config),
        evaluator=_evaluator(config, held_out, world, actor, generator, reward, sampling, tokenizer) if held_out else None,
        tokenizer=tokenizer,
        tracker=Trackers(),
        checkpoints=Checkpoints(run_dir / "checkpoints", world=world, keep_last=config.checkpoint.keep_last),
        stop=StopRequest(world, config.run.max_minutes),
        timer=timer,
        plan=_plan(config, steps),
        folder=RunFolder(run_dir, world=world, tokenizer=tokenizer, title=config.run.name),
    )
    _resume(config, trainer)
    if world.is_main:
        done = trainer.progress.step
        lines = banner(config, world, source, start.path, steps, optimizer_steps, gap, done)
        trainer.tracker = _trackers(config, run_dir, steps, done, lines)
    return trainer


# -- before anything is loaded ----------------------------------------------------------------------------------------------------------


def _check_device(config: Config, world: World) -> None:
    on_cpu = world.device.type == "cpu"
    wrong = [
        f"{role}.model.dtype=fp16: needs a GPU; use bf16 or fp32"
        for role in ("actor", "critic")
        if on_cpu and getattr(config, role).model.dtype == "fp16"
    ]
    if wrong:
        raise UserError(*wrong)


def _on_main(world: World, action: Callable[[], Any]) -> None:
    """Run it on rank 0 alone; where it raises a UserError, every rank does."""
    problems: list[str] = []
    if world.is_main:
        try:
            action()
        except UserError as error:
            problems = error.problems
    problems = world.gather_objects(problems)[0]
    if problems:
        raise UserError(*problems)


def _open_run_directory(run_dir: Path, config: Config) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True)
        (run_dir / "config.yaml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.dir={run_dir}: cannot be written: {error.strerror}") from error


# -- data -------------------------------------------------------------------------------------------------------------------------------


def _tokenizer(config: Config) -> Tokenizer:
    model, data = config.actor.model, config.data
    return load_tokenizer(model.path, model.revision, model.trust_remote_code, data.chat_template, data.chat_template_kwargs, key="actor.model.path")


def _source(config: Config, tokenizer: Tokenizer, path: str, split: str, key: str, max_samples: int | None) -> PromptSource:
    data = config.data
    return PromptSource(
        path,
        tokenizer=tokenizer,
        split=split,
        revision=data.revision,
        prompt_column=data.prompt_column,
        text_as_chat=data.text_as_chat,
        max_samples=max_samples,
        max_prompt_tokens=data.max_prompt_tokens,
        long_prompts=data.long_prompts,
        key=key,
    )


def _stream(config: Config, world: World, source: PromptSource) -> PromptStream:
    rollout = config.rollout
    return PromptStream(
        source,
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        rank=world.rank,
        world_size=world.size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )


# -- the loop's parts -----------------------------------------------------------------------------------------------------------------------


def _sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    s = config.sampling
    stop = tokenizer.stop_ids if s.stop_token_ids is None else tuple(s.stop_token_ids)
    return Sampling(s.max_new_tokens, s.min_new_tokens, s.temperature, s.top_p, s.top_k, stop, tuple(s.stop))


def _experience_maker(
    config: Config, world: World, actor: HybridActor, reference: FrozenModel, critic: TrainedModel, reward: Reward, timer: PhaseTimer
) -> ExperienceMaker:
    algo = config.algo
    return ExperienceMaker(
        actor=actor,
        reference=reference,
        critic=critic,
        reward=reward,
        world=world,
        token_budget=config.memory.score_tokens,
        reward_shape=RewardShape(
            kl_in_reward=algo.kl.place == "reward",
            kl_estimator=algo.kl.estimator,
            clip=algo.reward.clip,
            missing_eos=algo.reward.missing_eos,
            missing_eos_value=algo.reward.missing_eos_value,
        ),
        advantage_shape=AdvantageShape(algo.gae.gamma, algo.gae.lam, algo.gae.lam_critic, algo.advantage.whiten),
        timer=timer,
    )


def _optimizer_steps_per_step(config: Config) -> int:
    rollout = rollout_size(config)
    return config.algo.epochs * (rollout // (config.algo.minibatch_size or rollout))


def _learner(config: Config, world: World, actor: HybridActor, critic: TrainedModel, timer: PhaseTimer) -> Learner:
    algo = config.algo
    return Learner(
        actor=actor,
        critic=critic,
        world=world,
        epochs=algo.epochs,
        minibatch_size=algo.minibatch_size or rollout_size(config),
        token_budget=config.memory.train_tokens,
        policy=PolicyObjective(
            clip_low=algo.policy.clip_low,
            clip_high=algo.policy.clip_high,
            dual_clip=algo.policy.dual_clip,
            agg=algo.loss.agg,
            entropy_coef=algo.entropy.coef,
            kl_in_loss=algo.kl.place == "loss",
            kl_estimator=algo.kl.estimator,
        ),
        value=ValueObjective(algo.value.clip, algo.value.half, algo.value.coef, algo.loss.agg),
        timer=timer,
    )


def _kl_controller(config: Config) -> FixedKLController:
    kl = config.algo.kl
    if kl.controller == "adaptive":
        return AdaptiveKLController(kl.coef, kl.target, kl.horizon, kl.min_coef, kl.max_coef)
    if kl.controller == "threshold":
        return ThresholdKLController(kl.coef, kl.target, min_coef=kl.min_coef, max_coef=kl.max_coef)
    return FixedKLController(kl.coef)


def _evaluator(
    config: Config,
    source: PromptSource,
    world: World,
    actor: HybridActor,
    generator: HFGenerator,
    reward: Reward,
    sampling: Sampling,
    tokenizer: Tokenizer,
) -> Evaluator:
    rows = config.rollout.prompts_per_step * config.rollout.samples_per_prompt // world.size
    batches = eval_batches(source, rank=world.rank, world_size=world.size, rows_per_batch=rows, max_prompts=config.eval.max_prompts)
    return Evaluator(
        batches,
        actor=actor,
        generator=generator,
        reward=reward,
        sampling=sampling.as_greedy() if config.eval.greedy else sampling,
        correct_above=config.eval.correct_above,
        tokenizer=tokenizer,
        world=world,
    )


def _plan(config: Config, steps: int) -> Plan:
    kl = config.algo.kl
    return Plan(
        total_steps=steps,
        stop_at_step=config.run.stop_at_step,
        eval_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        keep_best=config.checkpoint.keep_best,
        samples_per_prompt=config.rollout.samples_per_prompt,
        sample_rows=config.tracker.samples,
        seed=config.run.seed,
        kl_metric="kl/ref_seq_mean" if kl.unit == "sequence" else "kl/ref_token_mean",
        kl_target=None if kl.controller == "fixed" else kl.target,
    )


# -- resume and what is shown -----------------------------------------------------------------------------------------------------------------


def _resume(config: Config, trainer: Trainer) -> None:
    if config.run.resume == "never":
        return
    path = trainer.checkpoints.latest() if config.run.resume == "auto" else Path(config.run.resume)
    if path is not None:
        trainer.resume(path)


def _trackers(config: Config, run_dir: Path, steps: int, first_step: int, lines: str) -> Trackers:
    console, jsonl = ConsoleTracker(steps, first_step=first_step), JsonlTracker(run_dir, resumed_at=first_step)
    console.banner(lines, title=f"ppo_ds: {config.run.name}")
    chosen: list[Tracker] = [jsonl, console]
    wandb = config.tracker.wandb
    if wandb.mode != "disabled":
        chosen.append(
            WandbTracker(run_dir, mode=wandb.mode, project=wandb.project, name=wandb.name or config.run.name, entity=wandb.entity, tags=wandb.tags)
        )
    trackers = Trackers(chosen, max_samples=config.tracker.samples, elapsed=jsonl.elapsed)
    trackers.start(resolved(config))
    return trackers
