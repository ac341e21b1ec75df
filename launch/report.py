"""Builds report.html of a run, or one report that overlays several runs.

    python launch/report.py RUN              # writes RUN/report.html
    python launch/report.py RUN RUN ... -o compared.html

RUN is a run directory (run.dir) of any stage, even if the run was killed or is still running. The page is one
file that needs no network. Exit code 0: written; 2: a RUN is no run directory; 1: any other error.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser
from launch.process import complain
from ppo_ds.errors import UserError


def main(argv: list[str]) -> int:
    parser = Parser(prog="launch/report.py", description=__doc__.split("\n")[0])
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directory, such as outputs/first"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write; default: report.html in RUN, or compared.html here for several runs",
    )
    try:
        options = parser.parse_args(argv)
        runs: list[Path] = options.runs
        target = options.output or (runs[0] / "report.html" if len(runs) == 1 else Path("compared.html"))
        if options.output and not target.parent.is_dir():
            raise UserError(f"--output={target}: no such directory {target.parent}")
        if target.is_dir():
            raise UserError(f"--output={target}: is a directory; name a file: {target / 'report.html'}")
        from ppo_ds.tracking.html.report import write_report  # after the arguments: slow to import

        write_report(runs, target)
    except UserError as error:
        return complain(error)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
