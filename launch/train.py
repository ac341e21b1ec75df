"""Trains a model: deepspeed launch/train.py +experiment=rlhf. torchrun and plain python start it too.

Exit code 0: done; 2: the config, the data or a model folder is wrong, torch cannot use the machine's GPU, or
another run uses the run directory or the port (one rank prints one line per problem); 143: a signal stopped
the run after a checkpoint was saved; 130: interrupted; 1: any other error.
"""

from __future__ import annotations

import gc
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
# Makes the repository importable, and keeps launch/ itself off the path: its modules would shadow others.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

if __name__ == "__main__":
    # until the config is read: a collection would free nothing and delay the report of errors in the config
    gc.disable()
from launch.cli import load_config  # noqa: E402
from launch.hub import use_caches_without_the_hub  # noqa: E402
from ppo_ds.config.checks.data import hub_names  # noqa: E402
from ppo_ds.config.registry import has_own_weights  # noqa: E402
from ppo_ds.distributed.exit import exit_now, on_exit, run_with_timeout  # noqa: E402
from ppo_ds.distributed.gpus import refuse_unused_gpu, supports_expandable_segments  # noqa: E402
from ppo_ds.distributed.launcher import check_port, launch_id  # noqa: E402
from ppo_ds.errors import RunError, UserError, printable  # noqa: E402
from ppo_ds.secrets import censored  # noqa: E402
from ppo_ds.storage import run_lock  # noqa: E402
from ppo_ds.storage.run_directory import check_run_directory, find_problems  # noqa: E402
from ppo_ds.tracking.screen import Screen  # noqa: E402

if TYPE_CHECKING:
    from ppo_ds.distributed.watchdog import ExitCode, Watchdog

QUIET = {
    "PYTHONWARNINGS": "ignore",  # for subprocesses
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "WANDB_SILENT": "true",
    # otherwise torch logs ten lines on each rank when a failed rank's store is gone
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    # On H100 and B200, torch prefers cuDNN's attention (check_prefer_cudnn_attention in its sdp_utils.cpp).
    # cuDNN compiles a plan for each new shape, and nearly every padded micro-batch has a new shape. Not tried
    # on a GPU.
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}
# The names that torch 2.11 to 2.13 read; the first is the current one.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Buffers of the phases of a step differ in size. With fixed segments, those that are freed leave holes.
# CUDA graphs work with expandable segments since torch 2.5, as long as they contain no NCCL collectives
# (https://github.com/pytorch/pytorch/issues/158029); those of the decode backends contain none.
# Not tried on a GPU.
EXPANDABLE_SEGMENTS = "expandable_segments:True"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # environment of a dry run
# time that the other ranks wait before they end: when one rank ends, the launcher ends rank 0 too, which must
# print the problems first
RANK_0_SECONDS = 10.0
# time limit for closing the logs of a failed run, where a collective hangs if other ranks have ended
CLOSE_SECONDS = 5.0


def main(argv: list[str]) -> int:
    try:
        config = load_config(argv)
        lock = None if config.run.dry_run else take_lock(Path(config.run.dir or ""))
        if os.environ.get("RANK") == "0":
            check_port(os.environ)
        gc.enable()
        if config.run.dry_run:
            os.environ |= CPU_ONLY
        screen = open_screen()
        own_pool = "rollout" in type(config).model_fields and has_own_weights(config.rollout.backend)
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

    watch = Watchdog()
    try:
        if config.run.dry_run:
            from ppo_ds.assemble.dry_run import finish_dry_run, start_dry_run

            ranks, is_main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
            config = start_dry_run(config, ranks, is_main)
        run = build_run(config, watch, mark_ending=mark_ending, screen=screen)
    except UserError as error:
        mark_ending()
        exit_now(
            watch.fail(problem_lines(error), str(error), 2, own=True) if watch.started else complain(error)
        )
    except BaseException as error:  # including KeyboardInterrupt and sys.exit() in user code
        mark_ending()
        exit_now(report(error, watch, screen))
    watch.set_timeout(config.run.timeout_minutes, lambda why: run.fail(RuntimeError(why)))
    try:
        reason = run.fit()
        if config.run.dry_run and reason == "done":
            finish_dry_run(run, config)
        run.world.barrier()  # the watchdog must watch until all ranks are done
    except BaseException as error:
        mark_ending()
        code = report(error, watch, screen)
        run_with_timeout(CLOSE_SECONDS, partial(run.fail, error))
        exit_now(code)
    watch.stop()
    run.world.close()
    # a normal interpreter exit may crash in threads of the libraries although the run succeeded
    exit_now(EXIT_CODES[reason])


def open_screen() -> Screen | None:
    """Opens the screen of rank 0, which shows the start-up and then the run; None on the other ranks."""
    if os.environ.get("RANK", "0") != "0":
        return None
    screen = Screen()
    on_exit(screen.close)
    screen.say("starting   importing torch")
    return screen


def take_lock(run_dir: Path) -> run_lock.RunLock | None:
    """Checks the run directory on rank 0 and takes its lock, which is held until this process ends.

    The other ranks on rank 0's node only check that no other run holds the lock, so that they end with the
    same exit code as rank 0. The check does not import torch, so a second start is refused within a second or
    two.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        check_run_directory(run_dir)
        lock = run_lock.acquire(run_dir, launch_id(os.environ), notice=write_line)
        on_exit(lock.release)
        lock.start_renewal(on_loss=end_run)
        return lock
    if os.environ.get("LOCAL_RANK") == rank:  # this rank is on the first node, like rank 0
        run_lock.check_free(run_dir, launch_id(os.environ))
    return None


def write_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def end_run(error: str) -> None:
    write_line(f"error: {error}")
    exit_now(1)


def report(error: BaseException, watch: Watchdog, screen: Screen | None) -> int:
    """Prints the error, unless another rank has failed before, and returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if screen is not None:
        screen.close()  # the watchdog writes to the terminal directly
    code: ExitCode = 130 if isinstance(error, KeyboardInterrupt) else 1
    # the messages of these errors are complete without a traceback
    explained = isinstance(error, RunError | KeyboardInterrupt)
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else error
    line = "; ".join((f"error: {message}", *getattr(error, "__notes__", ())))
    text = line if explained else "".join(traceback.format_exception(error))
    text = censored("\n".join(map(printable, text.split("\n"))))
    if watch.started:
        summary = censored(f"{type(error).__name__}: {error}".partition("\n")[0])
        return watch.fail(text, summary, code, own=explained)
    print(text, file=sys.stderr, flush=True)
    return code


def complain(error: UserError) -> int:
    """Prints the problems on one rank and returns exit code 2.

    Launchers end all ranks as soon as one has ended, so the other ranks wait until rank 0 has printed.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(RANK_0_SECONDS)
    print(problem_lines(error, "" if rank == "0" else f"rank {rank}: "), file=sys.stderr, flush=True)
    return 2


def warn_about(run_dir: Path) -> None:
    """Prints a warning for each reason why a run would refuse the run directory. Changes nothing in it."""
    for problem in find_problems(run_dir):
        write_line(printable(censored(f"warning: {run_dir}: {problem}")))


def problem_lines(error: UserError, prefix: str = "") -> str:
    return "\n".join(f"{prefix}error: {censored(line)}" for line in error.problems)


def prepare_environment(verbose: bool, trains: bool = False, fixed_segments: bool = False) -> None:
    """Sets environment variables that torch, deepspeed and transformers read at import or at first use.

    Variables that the user has set are kept. With ``verbose``, the log levels of the libraries do not change.
    The umask is set so that new files are never writable for every user, since a later start would refuse
    such files.

    With ``fixed_segments``, expandable segments, which vLLM's memory pool for sleeping does not support, are
    not switched on. If the user's own variable switches them on, vLLM 0.32 switches them off while it
    allocates in that pool, and on again afterwards (use_memory_pool in its device_allocator/cumem.py). Not
    tried on a GPU.

    With ``trains``, raises UserError if this machine has a GPU that torch cannot use and the user has not
    chosen the CPU.
    """
    os.umask(os.umask(0o077) | 0o002)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    expandable = supports_expandable_segments() and not fixed_segments
    if expandable and not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE_SEGMENTS
    if not verbose:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
    import torch

    if not torch.cuda.is_available():
        if trains:
            refuse_unused_gpu()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # Ctrl-C while the libraries are imported
        write_line("error: interrupted")
        code = 130
    exit_now(code)  # skips the libraries' destructors, which take longer than a config check
