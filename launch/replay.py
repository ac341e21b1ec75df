"""The optimizer step that ended a run, once more: `python launch/replay.py RUN_DIR/dumps/step_000012`; on a CPU, a row at a time.

Prints the losses of each row, and which of its tensors was the first that is not finite. Exit code 0: replayed, whatever was found;
2: it could not be, for a reason that is said in one line; 1: anything else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
# As in train.py: the repository must be found, and what stands beside this file must not shadow packages of the same name.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser  # noqa: E402
from launch.train import complain, prepare_environment  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402

if TYPE_CHECKING:
    from ppo_ds.tools.replay import Replay

SHOWN = 60  # characters of a prompt


def main(argv: list[str]) -> int:
    try:
        given = _parser().parse_args(argv)
        prepare_environment(verbose=False)
        from ppo_ds.tools.replay import replay  # torch, deepspeed and transformers: seconds

        found = replay(given.dump, trust_remote_code=given.trust_remote_code)
    except UserError as error:
        return complain(error)
    print("\n".join(lines(found)))
    return 0


def lines(found: Replay) -> list[str]:
    dump = found.dump
    where = "" if dump.place is None else f" (rank {dump.rank}, row {dump.row(dump.place)} of the rollout)"
    said = [f"step {dump.step}; then: {dump.what}{where}"]
    for row in found.rows:
        losses = "  ".join(f"{name} {loss:+.4e}" for name, loss in row.losses.items())
        prompt = dump.rows[row.position]["prompt"][:SHOWN]
        said.append(
            f"row {dump.row(row.position):3d}  loss: {losses}  first not finite: {row.first or '-'}  prompt {prompt!r}"
        )
    bad = next((row for row in found.rows if row.first is not None), None)
    if found.given is not None:
        said.append(f"not finite in what the step was given: {found.given}")
    if bad is not None:
        said.append(
            f"first tensor that is not finite: {bad.first}, row {dump.row(bad.position)} of the rollout"
        )
    if found.given is None and bad is None:
        said.append(
            "every loss and gradient is finite on this CPU: the numbers went wrong elsewhere (the hardware, a kernel, the order of sums)"
        )
    return said


def _parser() -> Parser:
    parser = Parser(
        prog="launch/replay.py",
        description="Makes a dumped optimizer step once more and says which tensor is the first that is not finite. Needs no GPU; changes nothing.",
        epilog="The models that the run began with must still be there; start this where the run was started if its paths were relative.",
        allow_abbrev=False,
    )
    parser.add_argument("dump", type=Path, metavar="RUN_DIR/dumps/step_NNNNNN")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code of models that the run trusted"
    )
    return parser


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the GPUs are the run's
    sys.exit(main(sys.argv[1:]))
