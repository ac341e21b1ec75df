"""The trainer: `deepspeed launch/train.py +experiment=rlhf`, or with torchrun, or with plain python; from any directory.

Exit code 0: done; 2: the config, the data or a model folder is wrong (one line for each problem, from one rank); 143: stopped by a signal, after
saving; 1: anything else.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if sys.path and Path(sys.path[0] or ".").resolve() == ROOT / "launch":
    sys.path[0] = str(ROOT)  # run as a script: what stands beside this file must not shadow packages of the same name

from launch.cli import load_config  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402

PATIENCE = 10.0  # seconds that other ranks leave rank 0 to speak for all, before the launcher ends them


def main(argv: list[str]) -> int:
    try:
        config = load_config(argv)
    except UserError as error:
        return complain(error)
    prepare_environment(config.run.verbose)
    from ppo_ds.build import build_trainer  # torch, deepspeed and transformers: seconds

    try:
        trainer = build_trainer(config)
    except UserError as error:
        leave(complain(error))
    try:
        return trainer.fit()
    except UserError as error:
        traceback.print_exception(error.__cause__)  # of the user's own code, where there is any
        print("\n".join(f"error: {line}" for line in error.problems), file=sys.stderr)
        leave(1)
    except Exception:
        traceback.print_exc()
        leave(1)


def complain(error: UserError) -> int:
    """Prints the problems once. Launchers end all ranks as soon as one has ended, so the others wait for rank 0 to have printed."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(PATIENCE)
    prefix = "error: " if rank == "0" else f"rank {rank}: error: "
    print("\n".join(prefix + line for line in error.problems), file=sys.stderr, flush=True)
    return 2


def leave(code: int) -> None:
    """Ends this process at once: a rank that fails alone must not wait for the others in the destructors of its communicators."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare_environment(verbose: bool) -> None:
    """What must be set before torch, deepspeed and transformers are imported; whatever the user has set stays."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_here))))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences the warning about forks
    if not verbose:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import warnings

        if not sys.warnoptions:
            warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


QUIET = {
    "PYTHONWARNINGS": "ignore",  # of subprocesses
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DS_LOG_LEVEL": "error",
    "WANDB_SILENT": "true",
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
