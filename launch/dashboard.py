"""Builds a workspace of Weights & Biases with a section for each group of metrics.

    python launch/dashboard.py ENTITY/PROJECT
    python launch/dashboard.py ENTITY/PROJECT --view ADDRESS    # replaces the sections of a saved workspace

It needs the extra dashboards (pip install -c constraints.txt -e '.[dashboards]') and the API key of wandb in
WANDB_API_KEY or from `wandb login`. The project must have been created, for example by a run with
tracker=wandb. Exit code 0: the workspace is saved; 2: the command line is wrong or the extra is missing; 1:
wandb rejected the workspace or cannot be reached.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser
from launch.process import complain
from ppo_ds.errors import UserError, printable
from ppo_ds.secrets import censored


def main(argv: list[str]) -> int:
    parser = Parser(prog="launch/dashboard.py", description=__doc__.split("\n")[0])
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="project of wandb, such as my-team/ppo_ds")
    parser.add_argument("--name", default="ppo_ds", help="name of the workspace; default: ppo_ds")
    parser.add_argument("--view", metavar="ADDRESS", help="address of a saved workspace to change")
    try:
        options = parser.parse_args(argv)
        entity, separator, project = options.project.partition("/")
        if not entity or not separator or not project or "/" in project:
            raise UserError(f"{options.project}: is not ENTITY/PROJECT, such as my-team/ppo_ds")
        from ppo_ds.tools.dashboard import save_workspace  # after the arguments: slow to import

        address = save_workspace(entity, project, options.name, options.view)
    except UserError as error:
        return complain(error)
    except Exception as error:  # wandb's errors have no common class
        reason = " ".join(censored(str(error)).split()) or type(error).__name__
        print(printable(f"error: wandb: {reason}"), file=sys.stderr)
        return 1
    print(address)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
