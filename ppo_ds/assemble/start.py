"""Decides where a run starts, and opens its directory."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ppo_ds.config.registry import STAGES, import_target
from ppo_ds.config.resume import Settings, changes, check_resume, ranks_line
from ppo_ds.config.schema import Config, main_model_path
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.errors import UserError
from ppo_ds.run.record import (
    begins_anew,
    finish_move,
    names_to_move,
    open_run_directory,
    recorded_settings,
    writing,
)
from ppo_ds.storage.shared_directory import probe, sees_probe
from ppo_ds.tracking.banner import Banner


def open_start(
    config: Config, settings: dict[str, Any], world: World, checkpoints: Checkpoints, banner: Banner
) -> Path | None:
    """Opens the run directory and returns the checkpoint to resume from, if any. All ranks must call this.

    First checks data and rewards, before it moves the record of an earlier run. Raises UserError for
    mistakes in them, or else if the run cannot resume from the checkpoint with these ``settings``.
    """
    run_dir, resume = Path(config.run.dir or ""), config.run.resume
    check_shared(run_dir, world)
    on_main(world, lambda: banner.note(*finish_move(run_dir)))
    restart = resume == "restart" and on_main(world, lambda: begins_anew(run_dir, settings))
    start: Path | None = None
    if resume in ("auto", "restart") and not restart:
        start = checkpoints.latest()
    elif resume not in ("auto", "restart", "never"):
        start = Path(resume)
        checkpoints.verify(start)
    before, refusal = None, None
    if start is not None:
        before = checkpoints.settings_of(start)
        try:
            banner.note(*(check_resume(before, settings, start) if before else []))
        except UserError as error:
            refusal = error
    if refusal or on_main(world, lambda: names_to_move(run_dir, settings, start, restart)):
        before = before or on_main(world, lambda: recorded_settings(run_dir))
        check_new_inputs(config, before, settings, world)
    if refusal:
        raise refusal
    if start is not None:
        banner.note(*ranks_line(checkpoints.world_size_of(start), world.size))
        if resume == "restart":
            banner.note(
                f"restart    run.resume=restart already began a run in {run_dir} with the same settings, "
                "which is resumed; to begin another one, choose another run.dir"
            )
    on_main(world, lambda: banner.note(*open_run_directory(run_dir, settings, start, restart)))
    return start


def check_shared(run_dir: Path, world: World) -> None:
    """Raises UserError unless every rank sees what rank 0 writes to the run directory.

    All ranks must call this. Without the check, checkpoints could silently lack the files of other nodes.
    """
    if world.size == 1:
        return

    def create() -> str:
        with writing(run_dir):
            return stack.enter_context(probe(run_dir))

    with ExitStack() as stack:
        name = on_main(world, create)
        seen = world.is_main or sees_probe(run_dir, name)
        found = world.gather_objects((platform.node(), str(run_dir.absolute()), seen))
    blind: dict[tuple[str, str], str] = {}  # one entry for all ranks of a node
    for rank, (host, path, seen) in enumerate(found):
        if not seen:
            blind.setdefault((host, path), f"rank {rank} on {host} ({path})")
    if blind:
        listed = ", ".join([*blind.values()][:3]) + (f" and {len(blind) - 3} more" * (len(blind) > 3))
        host, path, _ = found[0]
        raise UserError(
            f"run.dir={run_dir}: {listed} cannot see what rank 0 on {host} writes to {path}; choose a "
            "directory on a file system that all nodes share"
        )


def check_new_inputs(config: Config, before: Settings | None, settings: Settings, world: World) -> None:
    """Raises UserError for mistakes in rewards, and in data unless `prepare` has yet to create it.

    ``before`` are the settings of the earlier run in the directory, if any. All ranks must call this.
    """
    check = STAGES[config.stage].check
    if check is None:
        return
    changed = [key for key, _, _ in changes(before, settings)] if before else ["prepare."]
    outdated = config.prepare is not None and any(key.startswith("prepare.") for key in changed)
    missing = config.prepare is not None and not Path(main_model_path(config)).exists()
    import_target(check)(config, world, prepared=not outdated and not missing)


def on_main(world: World, action: Callable[[], Any]) -> Any:
    """Runs ``action`` on rank 0. All ranks must call this, and return its result or raise its UserError."""
    result, problems = None, []
    if world.is_main:
        try:
            result = action()
        except UserError as error:
            problems = error.problems
    result, problems = world.gather_objects((result, problems))[0]
    if problems:
        raise UserError(*problems)
    return result
