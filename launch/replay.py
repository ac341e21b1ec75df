"""Replays the optimizer step that ended a run: python launch/replay.py RUN_DIR/dumps/step_000012.

It runs on the CPU, row by row, and prints each row's losses and first non-finite tensor.

Exit code 0: replayed, with any result; 2: the replay is not possible (one line states the reason); 1: any
other error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser
from launch.process import complain, prepare_environment, warn_about
from ppo_ds.errors import RunError, UserError, printable

if TYPE_CHECKING:
    from ppo_ds.tools.replay import Replay

PROMPT_CHARACTERS = 60  # characters of each row's prompt in the output


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="launch/replay.py",
        description=(
            "Replays a dumped optimizer step and prints the first non-finite tensor. "
            "Needs no GPU and changes no files."
        ),
        epilog=(
            "The initial models of the run must still exist. If their paths were relative, start this "
            "command in the directory where the run was started."
        ),
    )
    parser.add_argument("dump", type=Path, metavar="RUN_DIR/dumps/step_NNNNNN")
    parser.add_trust()
    try:
        options = parser.parse_args(argv)
        prepare_environment(verbose=False)
        # imported only here, because it imports torch, deepspeed and transformers, which takes seconds
        from ppo_ds.tools.replay import replay

        if options.dump.absolute().parent.name == "dumps":
            warn_about(options.dump.absolute().parent.parent)
        result = replay(options.dump, trust_remote_code=options.trust_remote_code)
    except (UserError, RunError) as error:  # RunError: files of a model are damaged
        return complain(error)
    print("\n".join(map(printable, report_lines(result))))
    return 0


def report_lines(result: Replay) -> list[str]:
    dump = result.dump
    where = "" if dump.place is None else f" (rank {dump.rank}, row {dump.row(dump.place)} of the rollout)"
    lines = [f"step {dump.step}, in the run: {dump.what}{where}"]
    for row in result.rows:
        losses = "  ".join(f"{name} {loss:+.4e}" for name, loss in row.losses.items())
        prompt = dump.rows[row.position]["prompt"][:PROMPT_CHARACTERS]
        first = f"first non-finite tensor: {row.first or '-'}"
        lines.append(f"row {dump.row(row.position):3d}  loss: {losses}  {first}  prompt {prompt!r}")
    bad = next((row for row in result.rows if row.first is not None), None)
    if result.given is not None:
        lines.append(f"the dumped experience is not finite: {result.given}")
    if bad is not None:
        lines.append(f"first non-finite tensor: {bad.first}, row {dump.row(bad.position)} of the rollout")
    if result.given is None and bad is None:
        lines.append(
            "all losses and gradients are finite on this CPU: the non-finite values have another cause "
            "(hardware, a kernel, the order of summation)"
        )
    return lines


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # leaves the GPUs to the run
    sys.exit(main(sys.argv[1:]))
