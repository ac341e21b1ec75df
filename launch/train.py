"""The trainer: `deepspeed launch/train.py +experiment=rlhf`, or with torchrun, or with plain python; from any directory.

Exit code 0: done; 2: the config, the data or a model folder is wrong (one line for each problem, from one rank); 143: stopped by a signal, after
saving; 1: anything else.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
# Run as a script: the repository must be found, and what stands beside this file must not shadow packages of the same name.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import load_config  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402
from ppo_ds.secrets import censored  # noqa: E402

QUIET = {
    "PYTHONWARNINGS": "ignore",  # of subprocesses
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "WANDB_SILENT": "true",
}
PATIENCE = 10.0  # seconds that other ranks leave rank 0 to speak for all, before the launcher ends them


def main(argv: list[str]) -> int:
    try:
        config = load_config(argv)
    except UserError as error:
        return complain(error)
    prepare_environment(config.run.verbose)
    from ppo_ds.algo.trainer import EXIT_CODES  # torch, deepspeed and transformers: seconds, so only for a sound config
    from ppo_ds.build import build_trainer

    try:
        trainer = build_trainer(config)
    except UserError as error:
        leave(complain(error))
    except Exception:
        traceback.print_exc()
        leave(1)
    try:
        reason = trainer.fit()
    except BaseException as error:  # also KeyboardInterrupt, and sys.exit() in a reward
        traceback.print_exc()
        sys.stderr.flush()  # before the launcher hears of it
        try:
            trainer.fail(error)
        finally:
            leave(130 if isinstance(error, KeyboardInterrupt) else 1)
    trainer.world.close()
    leave(EXIT_CODES[reason])  # what threads of the libraries do in an orderly end can abort a run that went well


def complain(error: UserError) -> int:
    """Prints the problems once. Launchers end all ranks as soon as one has ended, so the others wait for rank 0 to have printed."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(PATIENCE)
    prefix = "error: " if rank == "0" else f"rank {rank}: error: "
    print("\n".join(prefix + censored(line) for line in error.problems), file=sys.stderr, flush=True)
    return 2


def leave(code: int) -> NoReturn:
    """Ends this process at once: a rank that fails alone must not wait for the others in the destructors of its communicators."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
