"""Config to objects: the only place where the parts are wired together."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ppo_ds.advice import warnings
from ppo_ds.algo.evaluation import Evaluator
from ppo_ds.algo.folder import RunFolder
from ppo_ds.algo.parity import GATE_PROMPTS, parity_gate
from ppo_ds.algo.sampling import DynamicSampler, Sampler
from ppo_ds.algo.stopping import StopRequest
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.algo.trainer import Plan, Stateful, Trainer
from ppo_ds.algorithm import (
    eval_weights,
    experience_maker,
    hidden_stops,
    kl_controller,
    learner,
    optimizer_steps_per_step,
    pretraining,
    shadow,
    uses_critic,
)
from ppo_ds.banner import banner
from ppo_ds.config import Config, resolved
from ppo_ds.data.prompts import PromptSource, eval_batches
from ppo_ds.engine.checkpoint import Checkpoints
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.world import World, connect, seed_everything
from ppo_ds.errors import UserError
from ppo_ds.inputs import build_held_out, build_prompts, build_ptx, build_stream, build_tokenizer, stop_ids
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.roles import Needs, adapter_notes, build_actor, build_critic, build_reference, critic_start, placed
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

    tokenizer = build_tokenizer(config)
    source, held_out = build_prompts(config, tokenizer), build_held_out(config, tokenizer)
    prompts, ptx = build_stream(config, world, source), build_ptx(config, tokenizer)
    longest = max(source.longest, held_out.longest if held_out else 0) + config.sampling.max_new_tokens
    needs = Needs(tokenizer.vocab_size, max(longest, ptx.source.longest if ptx else 0))
    steps = config.run.steps or math.ceil((config.run.epochs or 0) * len(source) / config.rollout.prompts_per_step)
    each = optimizer_steps_per_step(config)
    if config.algo.value.warmup_steps >= steps:
        raise UserError(f"algo.value.warmup_steps={config.algo.value.warmup_steps}: leaves the actor none of the {steps} steps")
    actor_steps = (steps - config.algo.value.warmup_steps) * each
    critic_steps = (steps + config.algo.value.pretrain_rollouts) * each
    own_critic = uses_critic(config) and not config.critic.share_trunk
    sampling = _sampling(config, tokenizer)
    notes = warnings(config, hides_stops=bool(hidden_stops(config.algo.mask.include_eos, sampling.stop_token_ids, tokenizer.pad_id)))

    timer = PhaseTimer(world.device)
    actor = build_actor(config, world, needs, actor_steps, timer)
    reference = build_reference(config, world, needs, actor)
    reward = make_reward(
        tokenizer=tokenizer,
        place=lambda load, zero, dtype: placed(load, zero, dtype, world),
        agree=world.max_int,
        score_tokens=config.memory.score_tokens,
        reduce=world.sum,
        notes=notes,
    )
    start = critic_start(config, tokenizer) if own_critic else None
    critic = build_critic(config, start, world, needs, critic_steps) if start else None
    notes += adapter_notes(config, actor, critic)
    ema, lagged = shadow(actor, config.actor.ema.decay is not None), shadow(actor, config.algo.old_policy == "lagged")

    generator = HFGenerator(lambda: actor.lm, tokenizer=tokenizer, token_budget=config.memory.rollout_tokens)
    few = source.batch([(world.rank + i) % len(source) for i in range(GATE_PROMPTS)])
    gap = parity_gate(
        few, actor=actor, generator=generator, sampling=sampling, dtype=config.actor.model.dtype, token_budget=config.memory.score_tokens
    )
    seed_everything(config.run.seed + RANK_SEED_OFFSET * (world.rank + 1))
    make_experience = experience_maker(
        config,
        world=world,
        actor=actor,
        reference=reference,
        critic=critic,
        lagged=lagged,
        stop_token_ids=sampling.stop_token_ids,
        pad_id=tokenizer.pad_id,
        timer=timer,
    )
    kl = kl_controller(config)
    trainer = Trainer(
        world=world,
        actor=actor,
        critic=critic,
        prompts=prompts,
        sample=_sampler(config, world, actor, generator, reward, sampling, timer),
        make_experience=make_experience,
        make_pretraining=pretraining(make_experience) if config.algo.value.pretrain_rollouts else None,
        learn=learner(config, world=world, actor=actor, critic=critic, ptx_texts=ptx, ema=ema, timer=timer),
        kl=kl,
        parts=_stateful(
            kl=kl if config.algo.kl.controller != "fixed" else None,  # a fixed coefficient is the config's to say, also after a resume
            prompts=prompts,
            scores=make_experience.shaper,
            reward=reward,
            ptx=ptx,
        ),
        ema=ema,
        lagged=lagged,
        eval_weights=eval_weights(ema, config.actor.ema.evaluate),
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
        lines = banner(config, world, source, start.path if start else None, steps, actor_steps, gap, done, notes)
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


# -- the loop's parts -----------------------------------------------------------------------------------------------------------------------


def _sampling(config: Config, tokenizer: Tokenizer) -> Sampling:
    s = config.sampling
    return Sampling(s.max_new_tokens, s.min_new_tokens, s.temperature, s.top_p, s.top_k, stop_ids(config, tokenizer), tuple(s.stop))


def _sampler(
    config: Config, world: World, actor: HybridActor, generator: HFGenerator, reward: Reward, sampling: Sampling, timer: PhaseTimer
) -> Sampler:
    dynamic, n = config.algo.dynamic_sampling, config.rollout.samples_per_prompt
    parts = {"actor": actor, "generator": generator, "reward": reward, "sampling": sampling, "timer": timer}
    return DynamicSampler(group_size=n, max_rounds=dynamic.max_rounds, world=world, **parts) if dynamic.enabled else Sampler(**parts)


def _stateful(**parts: Any) -> dict[str, Stateful]:
    """Those parts of the loop that have a state to remember."""
    return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


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
        reward=reward.evaluate if isinstance(reward, WeightedReward) else reward,
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
        critic_warmup=config.algo.value.warmup_steps,
        critic_pretraining=config.algo.value.pretrain_rollouts,
        lag=config.algo.lag,
        kl_after_update=kl.after_update,
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
