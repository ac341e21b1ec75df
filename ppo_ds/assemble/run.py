"""Builds a run of any stage from its config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_ds.assemble.banner import checkpoint_times, length, resumed
from ppo_ds.assemble.downloads import models_to_download
from ppo_ds.assemble.start import on_main, open_start
from ppo_ds.compute import matmul
from ppo_ds.config.checks.run import late_profile
from ppo_ds.config.registry import STAGES, import_target
from ppo_ds.config.schema import (
    OPEN_PARTS,
    Config,
    ConfigT,
    PPOConfig,
    best_metric,
    extra_rewards,
    lower_is_better,
    resolved,
    trained_models,
)
from ppo_ds.config.targets import bind
from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.store import RankStore
from ppo_ds.distributed.watchdog import Watchdog
from ppo_ds.distributed.world import World, connect, seed_everything
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.errors import UserError
from ppo_ds.models.download import download_files
from ppo_ds.planning.budgets import known_budgets, token_budgets, used_budgets, with_numbers
from ppo_ds.run.health import Health
from ppo_ds.run.loop import Run
from ppo_ds.run.record import write_settings
from ppo_ds.run.saver import Saver
from ppo_ds.run.stage import RunContext
from ppo_ds.run.state import Selection
from ppo_ds.run.stopping import StopRequest
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.run.token_budgets import TokenBudgets
from ppo_ds.tracking.background import BackgroundTracker, Dashboard
from ppo_ds.tracking.banner import Banner, titled
from ppo_ds.tracking.console import ConsoleTracker
from ppo_ds.tracking.html.live import ReportTracker
from ppo_ds.tracking.jsonl import JsonlTracker
from ppo_ds.tracking.screen import Screen
from ppo_ds.tracking.tensorboard import TensorBoardTracker
from ppo_ds.tracking.tracker import Tracker, Trackers
from ppo_ds.tracking.trackio import TrackioTracker
from ppo_ds.tracking.wandb import WandbTracker


def build_run(
    config: Config,
    watchdog: Watchdog | None = None,
    mark_ending: Callable[[], None] = lambda: None,
    screen: Screen | None = None,
    trackers: Sequence[Tracker] = (),
) -> Run:
    """Connects the ranks, builds the stage of ``config.stage`` and resumes from a checkpoint, if any.

    All ranks must call this. ``watchdog`` is started once the ranks are connected. ``mark_ending`` is called
    when the run starts to shut down. ``screen``, on rank 0 only, shows the progress. ``trackers`` are added
    to those of the config. Raises UserError for mistakes in config, data and models.
    """
    settings, banner = resolved(config), Banner(screen.say) if screen else Banner()
    # bound here to check the arguments, so that errors are reported before ranks are connected
    parts = {name: bind(settings[name], name) for name in OPEN_PARTS if settings.get(name) is not None}
    for name, section in extra_rewards(config).items():
        bind(section, f"eval.rewards.{name}")
    banner.starting(f"connecting {os.environ.get('WORLD_SIZE', '1')} rank(s)")
    world, stop = connect_ranks(config, watchdog, mark_ending)

    run_dir = Path(config.run.dir or "")
    checkpoints = Checkpoints(
        run_dir / "checkpoints", world=world, keep_last=config.checkpoint.keep_last, settings=settings
    )
    if "prepare" not in parts:
        download_files(models_to_download(config), world)
    if (run_dir / "checkpoints").exists():
        banner.starting(f"checking the last checkpoint in {run_dir}")
    start = open_start(config, settings, world, checkpoints, banner)
    config, budgets = open_budgets(config, settings, checkpoints, start, banner)
    if "prepare" in parts:  # `prepare` may create model folders, whose names may look like Hub names
        banner.starting(f"preparing by {settings['prepare']['_target_']}")
        on_main(world, parts["prepare"])
        download_files(models_to_download(config), world)

    seed_everything(config.run.seed)
    timer, health = PhaseTimer(world.device), Health(config.health.max_skips)
    context = RunContext(
        world=world, run_dir=run_dir, stop=stop, timer=timer, health=health, banner=banner, budgets=budgets
    )
    run = build_loop(config, context, checkpoints, mark_ending)
    if start is not None:
        banner.starting(f"reading {start}")
        run.saver.resume(start)
    run.saver.check_disk_space()
    check_profile(config, run.saver.state.step, run.stage.total_steps, banner)
    if world.is_main:
        steps, done = run.stage.total_steps, run.saver.state.step
        times = checkpoint_times(config.checkpoint)
        banner.summarize(length(config.run, steps), times, *resumed(str(run_dir), start, done, steps))
        if config.run.note:
            banner.note(titled("note", config.run.note))
        run.track(start_trackers(config, settings, steps, done, banner.render(), screen, trackers))
    return run


def connect_ranks(
    config: Config, watchdog: Watchdog | None, mark_ending: Callable[[], None]
) -> tuple[World, StopRequest]:
    """Connects the ranks and checks the machine. May raise UserError. All ranks must call this."""
    run = config.run
    group = config.memory.sequence_parallel if isinstance(config, PPOConfig) else 1
    world = connect(run.timeout_minutes, run.verbose, run.threads, run.deterministic, group)
    if run.matmul == "onednn" and not matmul.has_onednn():
        raise UserError("run.matmul=onednn: this torch was built without oneDNN; use auto")
    matmul.use(run.matmul)
    store = RankStore()
    stop = StopRequest(world, run.max_minutes, store)
    if watchdog is not None:
        watchdog.start(world, store)
        watchdog.add_callback(stop.poll)
        watchdog.add_callback(lambda: mark_ending() if stop.should_stop() else None)
    if world.device.type == "cpu":
        fp16 = [name for name, section in trained_models(config).items() if section.model.dtype == "fp16"]
        if fp16:
            raise UserError(*[f"{name}.model.dtype=fp16: needs a GPU; use bf16 or fp32" for name in fp16])
    return world, stop


def open_budgets(
    config: ConfigT, settings: dict[str, Any], checkpoints: Checkpoints, start: Path | None, banner: Banner
) -> tuple[ConfigT, TokenBudgets]:
    """Makes the token budgets, using the values that an earlier launch determined.

    All ranks must call this. Also returns the config with these values. ``start`` is the checkpoint to resume
    from. Changes of budgets are written to ``settings``, which checkpoints and config.yaml store.
    """
    world, run_dir, checkpoint = checkpoints.world, Path(config.run.dir or ""), None

    def record(numbers: Mapping[str, int]) -> None:
        used = {name: numbers[name] for name in used_budgets(config) if name in numbers}
        if used:
            settings["memory"] |= used
            if world.is_main:
                write_settings(run_dir, settings)

    if start is not None and checkpoints.world_size_of(start) == world.size:
        checkpoint = (checkpoints.settings_of(start) or {}).get("memory")
    numbers, halved_from, lines = on_main(
        world, lambda: known_budgets(config, run_dir, checkpoint, world.size)
    )
    banner.note(*lines)
    record(numbers)
    config = with_numbers(config, numbers)
    return config, token_budgets(config, world, run_dir, halved_from, record)


def build_loop(
    config: Config, context: RunContext, checkpoints: Checkpoints, mark_ending: Callable[[], None]
) -> Run:
    """Builds the stage of ``config.stage`` and the loop that trains it. All ranks must call this."""
    entry = STAGES[config.stage]
    stage = import_target(entry.target)(config, context)
    saver = Saver(
        context=context,
        stage=stage,
        checkpoints=checkpoints,
        config=config.checkpoint,
        selection=Selection(best_metric(config), lower_is_better(config), config.eval.patience),
    )
    return Run(
        context=context,
        stage=stage,
        saver=saver,
        name=config.run.name or config.stage,
        config=config.run,
        eval_every=config.eval.every,
        heldout={**entry.heldout} | {f"{name}_mean": f"eval/{name}_mean" for name in extra_rewards(config)},
        mark_ending=mark_ending,
    )


def check_profile(config: Config, done: int, steps: int, banner: Banner) -> None:
    """Raises UserError if the run has no step number run.profile; warns if that step is already done."""
    if problems := list(late_profile(config, steps)):
        raise UserError(*problems)
    if config.run.profile and config.run.profile <= done:
        banner.warn(f"run.profile={config.run.profile}: no trace, since the run resumes after step {done}")


def start_trackers(
    config: Config,
    settings: dict[str, Any],
    steps: int,
    done: int,
    banner: str,
    screen: Screen | None,
    more: Sequence[Tracker],
) -> Trackers:
    """Prints the banner and starts rank 0's trackers; ``done`` is the step to resume after, or 0."""
    run_dir = Path(config.run.dir or "")
    console = ConsoleTracker(
        config.stage,
        steps,
        activity=heartbeat.read,
        first_step=done,
        print_answers=config.tracker.print_answers,
        screen=screen or Screen(),
    )
    jsonl = JsonlTracker(run_dir, resumed_at=done)
    console.banner(banner, title=f"ppo_ds: {config.run.name}")
    # in this order, the report is complete before wandb ends and uploads it
    chosen: list[Tracker] = [jsonl, ReportTracker(run_dir), console]
    chosen += [*map(BackgroundTracker, dashboards(config, done)), *more]
    trackers = Trackers(chosen, max_samples=config.tracker.samples, elapsed=jsonl.elapsed)
    trackers.start(settings)
    return trackers


def dashboards(config: Config, done: int) -> Iterator[Dashboard]:
    run_dir, wandb, trackio = Path(config.run.dir or ""), config.tracker.wandb, config.tracker.trackio
    if wandb.mode != "disabled":
        yield WandbTracker(run_dir, wandb, wandb.name or config.stage)
    if config.tracker.tensorboard.enabled:
        yield TensorBoardTracker(run_dir, resumed_at=done)
    if trackio.enabled:
        yield TrackioTracker(run_dir, trackio, trackio.name or config.stage)
