"""Config to objects: the only place where the parts are wired together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_ds.build.algorithm import (
    Horizon,
    eval_weights,
    experience_maker,
    hidden_stops,
    horizon,
    kl_controller,
    learner,
    pretraining,
    shadow,
    uses_critic,
)
from ppo_ds.build.banner import resumed, summary
from ppo_ds.build.data import Inputs, read_inputs, stop_ids
from ppo_ds.build.generator import build_generator
from ppo_ds.build.preflight import preflight
from ppo_ds.build.roles import (
    Needs,
    RewardModels,
    adapter_notes,
    build_actor,
    build_critic,
    build_reference,
    choose_layouts,
    critic_start,
    plan_generation,
)
from ppo_ds.config.resume import judge, open_run_directory, ranks_line
from ppo_ds.config.schema import Config, resolved, rollout_size, uses_reference
from ppo_ds.config.targets import bind
from ppo_ds.config.warnings import slow_bf16, warnings
from ppo_ds.data.prompts import eval_batches
from ppo_ds.distributed.store import RankStore
from ppo_ds.distributed.watchdog import Watchdog
from ppo_ds.distributed.world import World, connect, seed_everything
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.processor import computes_bf16
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.collector import DynamicRolloutCollector, RolloutCollector
from ppo_ds.ppo.evaluation import Evaluator
from ppo_ds.ppo.trainer import Trainer
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.tracking.banner import Banner
from ppo_ds.tracking.console import ConsoleTracker
from ppo_ds.tracking.jsonl import JsonlTracker
from ppo_ds.tracking.tracker import Tracker, Trackers
from ppo_ds.tracking.wandb import WandbTracker
from ppo_ds.training.health import Health, KLMonitor
from ppo_ds.training.performance import build_meter
from ppo_ds.training.run_dir import RunDirectory
from ppo_ds.training.schedule import Schedule, Stateful
from ppo_ds.training.stopping import StopRequest
from ppo_ds.training.timing import PhaseTimer
from ppo_ds.types import Reward

RANK_SEED_OFFSET = 100_003  # a prime: ranks sample from streams that no seed of another run starts


def build_trainer(config: Config, watch: Watchdog | None = None) -> Trainer:
    """Everything of a run, loaded and checked, resumed where it left off. Raises UserError for what the user can mend. A collective.

    ``watch`` is started as soon as the ranks have met.
    """
    make_reward = bind(config.reward, "reward")
    prepare = bind(config.prepare, "prepare") if config.prepare else None
    world = connect(config.run.timeout_minutes, config.run.verbose, config.run.threads)
    notices = RankStore()
    if watch is not None:
        watch.start(world, notices)
    stop = StopRequest(world, config.run.max_minutes, notices)
    if watch is not None:
        watch.add_callback(stop.look)
    _check_device(config, world)
    run_dir, settings = Path(config.run.dir or ""), resolved(config)
    checkpoints = Checkpoints(
        run_dir / "checkpoints", world=world, keep_last=config.checkpoint.keep_last, settings=settings
    )
    start, notes = _start(config.run.resume, checkpoints, settings)
    banner = Banner()
    banner.note(*notes)
    _on_main(world, lambda: banner.note(*open_run_directory(run_dir, settings, start)))
    if prepare:
        _on_main(world, prepare)
    seed_everything(config.run.seed)

    inputs = read_inputs(config, world)
    length = horizon(config, len(inputs.source))
    sampling = _sampling(config, inputs.tokenizer)
    preflight(config, inputs)
    banner.note(*inputs.notes())
    hides_stops = bool(
        hidden_stops(config.algo.train_on_eos, sampling.stop_token_ids, inputs.tokenizer.pad_id)
    )
    banner.note(*warnings(config, hides_stops=hides_stops))
    if world.device.type == "cpu":
        banner.note(*slow_bf16(config, computes_bf16()))
    timer = PhaseTimer(world.device)
    roles = _roles(config, world, inputs, length, make_reward, banner, timer, stop.asked)
    generator, gap = build_generator(config, world, inputs, roles.actor, sampling, stop.asked, banner.note)
    seed_everything(config.run.seed + RANK_SEED_OFFSET * (world.rank + 1))
    trainer = _trainer(config, world, inputs, length, sampling, roles, generator, timer, stop, checkpoints)
    if start is not None:
        trainer.resume(start)
    trainer.expect_room()
    if world.is_main:
        done = trainer.progress.step
        banner.summarize(
            *summary(config, world, inputs.source, roles.critic_path, length.steps, length.actor, gap),
            *resumed(config.run.dir, done, length.steps),
        )
        trainer.tracker = _trackers(config, length.steps, done, banner.render())
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


def _start(resume: str, checkpoints: Checkpoints, settings: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, whole and of a run that this one may continue, and what is to be said of it; None: from the beginning."""
    if resume == "never":
        return None, []
    path = checkpoints.latest() if resume == "auto" else Path(resume)
    if path is None:
        return None, []
    if resume != "auto":
        checkpoints.verify(path)
    before = checkpoints.settings_of(path)
    notes = judge(before, settings, path) if before else []
    return path, notes + ranks_line(checkpoints.ranks_of(path), checkpoints.world.size)


# -- the loop's parts -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """Who acts, judges and is compared with."""

    actor: HybridActor
    reference: FrozenModel | None  # None: nobody asks for the KL
    reward: Reward
    critic: TrainedModel | None  # None: critic-free, or the actor has the value head
    critic_path: str | None  # where its first weights come from
    ema: WeightCopy | None
    lagged: WeightCopy | None


def _roles(
    config: Config,
    world: World,
    inputs: Inputs,
    length: Horizon,
    make_reward: Callable[..., Reward],
    banner: Banner,
    timer: PhaseTimer,
    stopped: Callable[[], bool],
) -> Roles:
    needs = Needs(
        inputs.tokenizer.id_bound,
        max(inputs.longest_prompt + config.sampling.max_new_tokens, inputs.longest_text),
    )
    start = (
        critic_start(config, inputs.tokenizer)
        if uses_critic(config) and not config.critic.share_trunk
        else None
    )
    actor = build_actor(config, world, needs, length.actor, timer)
    reference = build_reference(config, world, needs, actor) if uses_reference(config) else None
    critic = build_critic(config, start, world, needs, length.critic) if start else None
    load_frozen = RewardModels(world, banner.note)
    if critic is not None:
        load_frozen.offer(critic, start, config)  # before the reward asks for its model
    reward = make_reward(
        tokenizer=inputs.tokenizer,
        load_frozen=load_frozen,
        all_reduce_max=world.max_int,
        score_tokens=config.memory.score_tokens,
        reduce=world.sum,
        should_stop=stopped,
        note=banner.note,
    )
    banner.note(*adapter_notes(config, actor, critic), *choose_layouts(config, actor, reference, critic))
    ema, lagged = (
        shadow(actor, config.actor.ema.decay is not None),
        shadow(actor, config.algo.old_policy == "lagged"),
    )
    banner.note(*plan_generation(config, actor, critic))
    return Roles(actor, reference, reward, critic, start.path if start else None, ema, lagged)


def _trainer(
    config: Config,
    world: World,
    inputs: Inputs,
    length: Horizon,
    sampling: SamplingParams,
    roles: Roles,
    generator: Generator,
    timer: PhaseTimer,
    stop: StopRequest,
    checkpoints: Checkpoints,
) -> Trainer:
    run_dir, kl, tokenizer = Path(config.run.dir or ""), kl_controller(config), inputs.tokenizer
    health = Health(config.health.max_skips)
    make_experience = experience_maker(
        config,
        world=world,
        actor=roles.actor,
        reference=roles.reference,
        critic=roles.critic,
        lagged=roles.lagged,
        stop_token_ids=sampling.stop_token_ids,
        pad_id=tokenizer.pad_id,
        timer=timer,
    )
    return Trainer(
        world=world,
        actor=roles.actor,
        critic=roles.critic,
        prompts=inputs.prompts,
        sample=_sampler(config, world, roles, generator, sampling, timer, stop),
        make_experience=make_experience,
        make_pretraining=pretraining(make_experience) if config.algo.value.pretrain_rollouts else None,
        learn=learner(
            config,
            world=world,
            actor=roles.actor,
            critic=roles.critic,
            ptx_texts=inputs.ptx,
            ema=roles.ema,
            timer=timer,
            health=health,
        ),
        kl=kl,
        parts=_stateful(
            kl=kl
            if config.algo.kl.controller != "fixed"
            else None,  # a fixed coefficient is the config's to say, also after a resume
            prompts=inputs.prompts,
            scores=make_experience.shaper,
            reward=roles.reward,
            ptx=inputs.ptx,
        ),
        ema=roles.ema,
        lagged=roles.lagged,
        eval_weights=eval_weights(roles.ema, config.actor.ema.evaluate),
        evaluator=_evaluator(config, world, inputs, roles, generator, sampling, stop),
        tokenizer=tokenizer,
        tracker=Trackers(),
        checkpoints=checkpoints,
        stop=stop,
        timer=timer,
        meter=build_meter(world, roles.actor, roles.critic),
        plan=_plan(config, length.steps),
        folder=RunDirectory(run_dir, world=world, tokenizer=tokenizer, title=config.run.name),
        health=health,
        ceiling=KLMonitor(config.health.max_kl, stops=config.health.kl_action == "stop"),
    )


def _sampling(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    s = config.sampling
    return SamplingParams(
        s.max_new_tokens,
        s.min_new_tokens,
        s.temperature,
        s.top_p,
        s.top_k,
        stop_ids(config, tokenizer),
        tuple(s.stop),
    )


def _sampler(
    config: Config,
    world: World,
    roles: Roles,
    generator: Generator,
    sampling: SamplingParams,
    timer: PhaseTimer,
    stop: StopRequest,
) -> RolloutCollector:
    dynamic, n = config.algo.dynamic_sampling, config.rollout.samples_per_prompt
    parts = {
        "actor": roles.actor,
        "generator": generator,
        "reward": roles.reward,
        "sampling": sampling,
        "timer": timer,
        "check": stop.check,
    }
    return (
        DynamicRolloutCollector(group_size=n, max_rounds=dynamic.max_rounds, world=world, **parts)
        if dynamic.enabled
        else RolloutCollector(**parts)
    )


def _stateful(**parts: Any) -> dict[str, Stateful]:
    """Those parts of the loop that have a state to remember."""
    return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def _evaluator(
    config: Config,
    world: World,
    inputs: Inputs,
    roles: Roles,
    generator: Generator,
    sampling: SamplingParams,
    stop: StopRequest,
) -> Evaluator | None:
    if inputs.held_out is None:
        return None
    rows, most = rollout_size(config) // world.size, config.eval.max_prompts
    return Evaluator(
        eval_batches(
            inputs.held_out, rank=world.rank, world_size=world.size, rows_per_batch=rows, max_prompts=most
        ),
        actor=roles.actor,
        generator=generator,
        reward=roles.reward.evaluate if isinstance(roles.reward, WeightedReward) else roles.reward,
        sampling=sampling.as_greedy() if config.eval.greedy else sampling,
        correct_above=config.eval.correct_above,
        tokenizer=inputs.tokenizer,
        world=world,
        check=stop.check,
    )


def _plan(config: Config, steps: int) -> Schedule:
    kl = config.algo.kl
    return Schedule(
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


# -- what is shown --------------------------------------------------------------------------------------------------------------------------


def _trackers(config: Config, steps: int, first_step: int, lines: str) -> Trackers:
    run_dir = Path(config.run.dir or "")
    console, jsonl = (
        ConsoleTracker(steps, first_step=first_step),
        JsonlTracker(run_dir, resumed_at=first_step),
    )
    console.banner(lines, title=f"ppo_ds: {config.run.name}")
    chosen: list[Tracker] = [jsonl, console]
    wandb = config.tracker.wandb
    if wandb.mode != "disabled":
        chosen.append(
            WandbTracker(
                run_dir,
                mode=wandb.mode,
                project=wandb.project,
                name=wandb.name or config.run.name,
                entity=wandb.entity,
                tags=wandb.tags,
            )
        )
    trackers = Trackers(chosen, max_samples=config.tracker.samples, elapsed=jsonl.elapsed)
    trackers.start(resolved(config))
    return trackers
