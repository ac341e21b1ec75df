"""Trains a model: deepspeed launch/train.py +experiment=rlhf. torchrun and plain python start it too.

Exit code 0: done; 2: the config, the data or a model folder is wrong, torch cannot use the machine's GPU, or
another run uses the run directory or the port (one rank prints one line per problem); 143: a signal stopped
the run after a checkpoint was saved; 130: interrupted; 1: any other error.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Makes the repository importable, and keeps launch/ itself off the path: its modules would shadow others.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

if __name__ == "__main__":
    # until everything is imported: collections would free little and take a fifth of the imports' time
    gc.disable()
from launch.cli import load_config
from launch.hub import use_caches_without_the_hub
from launch.process import complain, prepare_environment, refuse, report, run_main, take_lock
from ppo_ds.config.checks.data import hub_names
from ppo_ds.config.schema import PPOConfig
from ppo_ds.distributed.exit import exit_now, on_exit, run_with_timeout
from ppo_ds.errors import UserError
from ppo_ds.tracking.screen import Screen

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # environment of a dry run
# time limit for closing the logs of a failed run, since a collective in it hangs if other ranks have ended
CLOSE_SECONDS = 5.0


def main(argv: list[str]) -> int:
    try:
        config = load_config(argv)
        lock = None if config.run.dry_run else take_lock(Path(config.run.dir or ""))
        if config.run.dry_run:
            os.environ |= CPU_ONLY
        screen = open_screen()
        own_pool = isinstance(config, PPOConfig) and config.rollout.own_weights
        prepare_environment(config.run.verbose, trains=True, fixed_segments=own_pool)
        use_caches_without_the_hub(hub_names(config))
    except UserError as error:
        return complain(error)
    mark_ending = lock.mark_ending if lock else lambda: None
    if screen is not None:
        screen.say("starting   importing DeepSpeed and transformers")
    # imported after the config is validated, since torch, deepspeed and transformers take seconds to import
    from ppo_ds.assemble.run import build_run
    from ppo_ds.distributed.watchdog import Watchdog
    from ppo_ds.run.state import EXIT_CODES

    gc.freeze()  # collections leave out what was imported
    gc.enable()
    watch = Watchdog()
    try:
        if config.run.dry_run:
            from ppo_ds.assemble.dry_run import finish_dry_run, start_dry_run

            ranks, is_main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
            config = start_dry_run(config, ranks, is_main)
        run = build_run(config, watch, mark_ending=mark_ending, screen=screen)
    except UserError as error:
        mark_ending()
        exit_now(refuse(error, watch))
    except BaseException as error:  # including KeyboardInterrupt and sys.exit() in user code
        mark_ending()
        exit_now(report(error, watch, screen, config.run.dir))
    watch.set_timeout(config.run.timeout_minutes, lambda why: run.fail(RuntimeError(why)))
    try:
        reason = run.fit()
        if config.run.dry_run and reason == "done":
            finish_dry_run(run, config)
        run.world.barrier()  # the watchdog must watch until all ranks are done
    except BaseException as error:
        mark_ending()
        code = report(error, watch, screen, config.run.dir)
        run_with_timeout(CLOSE_SECONDS, partial(run.fail, error))
        exit_now(code)
    watch.stop()
    run.world.close()
    # a normal interpreter exit may crash in threads of the libraries although the run succeeded
    exit_now(EXIT_CODES[reason])


def open_screen() -> Screen | None:
    """Opens rank 0's screen, which shows the start-up and then the run; returns None on other ranks."""
    if os.environ.get("RANK", "0") != "0":
        return None
    screen = Screen()
    on_exit(screen.close)
    screen.say("starting   importing torch")
    return screen


if __name__ == "__main__":
    run_main(main)
