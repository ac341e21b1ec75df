"""Exports a checkpoint as a Hugging Face folder: python launch/export.py RUN_DIR.

The run may still be training.

Exit code 0: exported, and uploaded with --push; 2: one line states the reason, and nothing was written unless
the upload failed; 1: any other error.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser
from launch.process import complain, prepare_environment, warn_about
from ppo_ds.errors import UserError, printable


def command_line() -> Parser:
    parser = Parser(
        prog="launch/export.py",
        description="Exports a model of a checkpoint as a Hugging Face folder. Needs no GPU.",
        epilog=(
            "The initial model of the run must still exist. If its path was relative, start this command in "
            "the directory where the run was started."
        ),
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
        choices=["actor", "critic", "scorer", "ema"],
        help="default: the actor, or the scorer of stage=reward_model; ema: its exponential moving average",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="export the best checkpoint instead of the newest")
    which.add_argument("--step", type=int, metavar="N", help="export the checkpoint of step N")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a model folder")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="with --push, upload the LoRA adapter instead of the merged model",
    )
    parser.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="upload the exported folder to the Hugging Face Hub with the token in HF_TOKEN",
    )
    parser.add_argument("--public", action="store_true", help="make a new repository of --push public")
    parser.add_trust()
    return parser


def main(argv: list[str]) -> int:
    try:
        options = command_line().parse_args(argv)
        token = check_options(options)
        prepare_environment(verbose=False)
        # slow: imports torch and transformers
        from ppo_ds.tools.export import export, find_checkpoint, main_model

        checkpoint = find_checkpoint(options.source, options.step, options.best)
        role = options.role or main_model(checkpoint)
        if checkpoint.parent.name == "checkpoints":
            warn_about(checkpoint.parent.parent)
        out = export(
            checkpoint,
            role,
            options.out,
            force=options.force,
            trust_remote_code=options.trust_remote_code,
            name=options.push,
            adapter=options.adapter,
        )
        print(printable(f"{checkpoint.name}, {role}: {out}"))
        if options.push:
            from ppo_ds.models.upload import push

            folder = out / "adapter" if options.adapter else out
            print(f"uploaded: {push(folder, options.push, token, private=not options.public)}")
    except UserError as error:
        return complain(error)
    return 0


def check_options(options: argparse.Namespace) -> str:
    """Checks the options of the upload and returns the Hub's token, which is empty without --push."""
    if options.push is None and (options.adapter or options.public):
        raise UserError(f"--{'adapter' if options.adapter else 'public'}: needs --push ORG/NAME")
    if options.push is None:
        return ""
    from ppo_ds.models.upload import check_push

    return check_push(options.push)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # leaves the GPUs to the run
    sys.exit(main(sys.argv[1:]))
