"""A checkpoint as a Hugging Face folder: `python launch/export.py RUN_DIR`; from any directory, also while the run goes on.

Exit code 0: written; 2: nothing was written, for a reason that is said in one line; 1: anything else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: the repository must be found, and what stands beside this file must not shadow packages of the same name.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser  # noqa: E402
from launch.train import complain, prepare_environment  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402


def main(argv: list[str]) -> int:
    try:
        given = _parser().parse_args(argv)
        prepare_environment(verbose=False)
        from ppo_ds.tools.export import export, find_checkpoint  # torch and transformers: seconds

        checkpoint = find_checkpoint(given.source, given.step, given.best)
        out = export(
            checkpoint, given.role, given.out, force=given.force, trust_remote_code=given.trust_remote_code
        )
    except UserError as error:
        return complain(error)
    print(f"{checkpoint.name}, {given.role}: {out}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="launch/export.py",
        description="Writes a model of a checkpoint as a Hugging Face folder. Needs no GPU.",
        epilog="The model that the run began with must still be there; start this where the run was started if its paths were relative.",
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="RUN_DIR_OR_CHECKPOINT")
    parser.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="default: RUN_DIR/exports/step_NNNNNN/model (or critic, model_ema)",
    )
    parser.add_argument(
        "--role",
        choices=["actor", "critic", "ema"],
        default="actor",
        help="ema: the running average of the actor",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    which.add_argument("--step", type=int, metavar="N", help="that of step N")
    parser.add_argument("--force", action="store_true", help="replace OUT, if it is a model folder")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code of models that the run trusted"
    )
    return parser


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs are the run's
    sys.exit(main(sys.argv[1:]))
