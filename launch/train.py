"""The trainer: `deepspeed launch/train.py +experiment=rlhf`, or with torchrun, or with plain python; from any directory.

Exit code 0: done; 2: the config, the data or a model folder is wrong (one line for each problem, from one rank); 143: stopped by a signal, after
saving; 1: anything else.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
# Run as a script: the repository must be found, and what stands beside this file must not shadow packages of the same name.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import load_config  # noqa: E402
from ppo_ds.distributed.exit import exit_now, run_with_timeout  # noqa: E402
from ppo_ds.errors import RunError, UserError  # noqa: E402
from ppo_ds.secrets import censored  # noqa: E402

if TYPE_CHECKING:
    from ppo_ds.distributed.watchdog import Watchdog

QUIET = {
    "PYTHONWARNINGS": "ignore",  # of subprocesses
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "WANDB_SILENT": "true",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # ten lines wherever the store of another rank's is gone, which is told in one (distributed/watchdog.py)
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # of a dry run
PATIENCE = 10.0  # seconds that other ranks leave rank 0 to speak for all, before the launcher ends them
CLOSING = 5.0  # seconds for the record of a run that has failed: the other ranks have left by then


def main(argv: list[str]) -> int:
    try:
        config = load_config(argv)
    except UserError as error:
        return complain(error)
    if config.run.dry_run:
        os.environ |= NO_GPU
    prepare_environment(config.run.verbose)
    # these import torch, deepspeed and transformers, which takes seconds
    from ppo_ds.build.run import build_run
    from ppo_ds.distributed.watchdog import Watchdog
    from ppo_ds.training.state import EXIT_CODES

    watch = Watchdog()
    try:
        if config.run.dry_run:
            from ppo_ds.build import dry_run

            config = dry_run.begin(
                config, int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
            )
        run = build_run(config, watch)
    except UserError as error:
        exit_now(watch.fail(complaint(error), str(error), 2, own=True) if watch.started else complain(error))
    except BaseException as error:  # also KeyboardInterrupt, and sys.exit() in a user's code
        exit_now(report(error, watch))
    watch.set_timeout(config.run.timeout_minutes, lambda why: run.fail(RuntimeError(why)))
    try:
        reason = run.fit()
        if config.run.dry_run and reason == "done":
            dry_run.conclude(run, config)
        run.world.barrier()  # to stop watching while others still work would be to miss how they fare
    except BaseException as error:
        code = report(error, watch)
        run_with_timeout(CLOSING, partial(run.fail, error))
        exit_now(code)
    watch.stop()
    run.world.close()
    exit_now(
        EXIT_CODES[reason]
    )  # what threads of the libraries do in an orderly end can abort a run that went well


def report(error: BaseException, watch: Watchdog) -> int:
    """Prints the traceback, where no other rank has failed before, and gives the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    told = isinstance(error, RunError)
    line = "; ".join((f"error: {error}", *getattr(error, "__notes__", ())))
    text = censored(line if told else "".join(traceback.format_exception(error)))
    if watch.started:
        return watch.fail(
            text, censored(f"{type(error).__name__}: {error}".partition("\n")[0]), code, own=told
        )
    print(text, file=sys.stderr, flush=True)
    return code


def complain(error: UserError) -> int:
    """Prints the problems once. Launchers end all ranks as soon as one has ended, so the others wait for rank 0 to have printed."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(PATIENCE)
    print(complaint(error, "" if rank == "0" else f"rank {rank}: "), file=sys.stderr, flush=True)
    return 2


def complaint(error: UserError, speaker: str = "") -> str:
    return "\n".join(f"{speaker}error: {censored(line)}" for line in error.problems)


def prepare_environment(verbose: bool) -> None:
    """What must be set before torch, deepspeed and transformers are imported; whatever the user has set stays."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not verbose:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
