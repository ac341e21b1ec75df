"""Holds code that all commands use: messages, exit codes, the lock of a directory, the environment.

Nothing here imports torch before ``prepare_environment`` has set the variables that torch reads.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ppo_ds.distributed.exit import exit_now, on_exit
from ppo_ds.distributed.gpus import refuse_unused_gpu, supports_expandable_segments
from ppo_ds.distributed.launcher import launch_id
from ppo_ds.errors import RunError, UserError, printable
from ppo_ds.secrets import censored
from ppo_ds.storage import run_lock
from ppo_ds.storage.run_directory import check_run_directory, find_problems

if TYPE_CHECKING:
    from ppo_ds.distributed.watchdog import ExitCode, Watchdog
    from ppo_ds.tracking.screen import Screen

QUIET = {
    "PYTHONWARNINGS": "ignore",  # for subprocesses
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "WANDB_SILENT": "true",
    "KINETO_LOG_LEVEL": "99",  # of torch.profiler
    # Otherwise torch logs ten lines on each rank when a failed rank's store is gone. If NCCL loses a peer,
    # torch logs C++ stacks before the trainer's line. Errors that end a process are still raised or printed.
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}
DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    # On H100 and B200, torch prefers cuDNN's attention (check_prefer_cudnn_attention in its sdp_utils.cpp).
    # cuDNN compiles a plan for each new shape, and nearly every padded micro-batch has a new shape. Not
    # tested on a GPU.
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}
# The names that torch 2.11 to 2.13 read; the first is the current one.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# The phases of a step allocate buffers of different sizes. With fixed segments, freed buffers leave holes.
# CUDA graphs work with expandable segments since torch 2.5, as long as they contain no NCCL collectives
# (https://github.com/pytorch/pytorch/issues/158029); the graphs of the decode backends contain none. Not
# tried on a GPU.
EXPANDABLE_SEGMENTS = "expandable_segments:True"
# time for which the other ranks wait before they end: when one rank ends, the launcher also ends rank 0,
# which must print the problems first
RANK_0_SECONDS = 10.0


def take_lock(run_dir: Path) -> run_lock.RunLock | None:
    """Checks the run directory on rank 0 and acquires its lock, which the end of the process releases.

    Returns the lock, or None on other ranks. Other ranks on rank 0's node check that no other run holds the
    lock, so that they end with the same exit code as rank 0. Torch is not imported.
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


def run_main(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a command; ends this process without the libraries' destructors, which are slow and may crash."""
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:  # Ctrl-C while the libraries are imported
        write_line("error: interrupted")
        code = 130
    exit_now(code)


def end_run(error: str) -> None:
    write_line(f"error: {error}")
    exit_now(1)


def report(error: BaseException, watch: Watchdog, screen: Screen | None, run_dir: str | None = None) -> int:
    """Closes ``screen``, prints the error unless another rank failed first, and returns the exit code."""
    full = re.search("No space left on device|Disk quota exceeded", str(error))
    if run_dir and full and not isinstance(error, RunError):
        error = RunError(f"run.dir={run_dir}: {full[0]}: free some space and repeat the command")
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


def complain(error: UserError | RunError) -> int:
    """Prints the problems and returns exit code 2.

    Ranks other than 0 first wait RANK_0_SECONDS: launchers end all ranks as soon as one has ended, and rank 0
    must have printed by then.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(RANK_0_SECONDS)
    print(problem_lines(error, "" if rank == "0" else f"rank {rank}: "), file=sys.stderr, flush=True)
    return 2


def refuse(error: UserError | RunError, watch: Watchdog) -> int:
    """Prints the problems, ends the other ranks if they are connected, and returns exit code 2."""
    return watch.fail(problem_lines(error), str(error), 2, own=True) if watch.started else complain(error)


def warn_about(run_dir: Path) -> None:
    """Prints a warning for each reason why a run would reject the run directory. Changes nothing in it."""
    for problem in find_problems(run_dir):
        write_line(printable(censored(f"warning: {run_dir}: {problem}")))


def problem_lines(error: UserError | RunError, prefix: str = "") -> str:
    problems = error.problems if isinstance(error, UserError) else UserError(str(error)).problems
    return "\n".join(f"{prefix}error: {censored(line)}" for line in problems)


def prepare_environment(verbose: bool, trains: bool = False, fixed_segments: bool = False) -> None:
    """Sets environment variables that torch, deepspeed and transformers read at import or at first use.

    Variables that the user has set are kept. With ``verbose``, the log levels of the libraries do not change.
    The umask is set so that no new file is writable for every user, since a later run would reject it.

    With ``fixed_segments``, torch's expandable segments stay off, since the memory pool of a vLLM engine that
    sleeps does not support them (not tested on a GPU). With ``trains``, raises UserError if this machine has
    a GPU that torch cannot use and the user has not chosen the CPU.
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
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns of a package that is not needed
    import torch

    if not torch.cuda.is_available():
        if trains:
            refuse_unused_gpu()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
