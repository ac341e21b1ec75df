"""Compares models on held-out prompts: deepspeed launch/evaluate.py SETTINGS

SETTINGS is the file evaluation_settings.json that launch/pipeline.py writes. The results are written beside
it: evaluation.json (scores and win rates) and evaluation.jsonl (responses). torchrun and plain python can
start the program too. Exit code 0: done; 2: the config, the data or a model folder is wrong;
1: any other error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import Parser  # noqa: E402
from launch.train import complain, prepare_environment, write_line  # noqa: E402
from ppo_ds.config.schema import from_tree, inherit  # noqa: E402
from ppo_ds.distributed.exit import exit_now  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402
from ppo_ds.storage.drafts import write_file  # noqa: E402
from ppo_ds.tools.pipeline import RESULT  # noqa: E402


def main(argv: list[str]) -> int:
    parser = Parser(prog="launch/evaluate.py", allow_abbrev=False)
    parser.add_argument("settings", type=Path, metavar="SETTINGS")
    parser.add_argument("--local_rank", "--local-rank", help="added by the deepspeed launcher; ignored")
    try:
        path: Path = parser.parse_args(argv).settings
        settings = json.loads(path.read_text(encoding="utf-8"))
        config, problems = from_tree(settings["config"])
        if problems:
            raise UserError(*(f"{path}: {line}" for line in problems.values()))
        config = inherit(config)
        prepare_environment(config.run.verbose, trains=True)
        from ppo_ds.distributed.world import connect, seed_everything  # slow: imports torch and deepspeed
        from ppo_ds.tools.evaluate import evaluate

        world = connect(config.run.timeout_minutes, config.run.verbose, config.run.threads)
        seed_everything(config.run.seed)
        note = write_line if world.is_main else lambda line: None
        result = evaluate(config, world, settings["models"], settings["rewards"], note)
    except UserError as error:
        return complain(error)
    if world.is_main:
        rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result.rows)
        write_file(path.with_name("evaluation.jsonl"), rows)
        write_file(path.with_name(RESULT), json.dumps(result.summary, indent=2, ensure_ascii=False) + "\n")
    world.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # a normal interpreter exit may crash in threads of the libraries although the run succeeded
    exit_now(code)
