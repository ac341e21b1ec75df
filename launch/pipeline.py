"""Runs SFT, reward model, PPO and an evaluation: python launch/pipeline.py +pipeline=NAME [ARGUMENT ...]

Each stage is an ordinary run in its own directory, outputs/NAME/STAGE, with its own launcher. The same
command resumes a pipeline that was stopped or killed at any point. Arguments:

    KEY=VALUE, GROUP=OPTION          for every stage that has the key or uses the group
    STAGE:KEY=VALUE                  for one stage, such as ppo:algo.kl.coef=0.1
    evaluation:KEY=VALUE             for the evaluation, such as evaluation:eval.max_prompts=100
    ranks=N, STAGE:ranks=N           number of ranks; default: one for each visible GPU, or one without GPUs
    run.name=NAME, run.dir=DIR       name and directory of the pipeline; default: its own name, outputs/<name>
    run.dry_run=true                 a dry run of each stage with tiny models, on the results of earlier ones
    --cfg job                        prints the configs of the stages and the evaluation
    --config-dir DIR                 another folder of configs, with DIR/pipeline/NAME.yaml

The file conf/pipeline/NAME.yaml lists the stages and, for each, its arguments of launch/train.py. In these
arguments, ${stages.STAGE.KEY} stands for the value of a key of an earlier stage, as in
${stages.sft.run.dir}/model.

Exit code 0: done, or a stage ended early (run.stop_at_step, run.max_minutes); 2: a mistake in the arguments,
the configs or the data; 143: a signal stopped the running stage after it saved a checkpoint; 130: a second
Ctrl-C killed the stage; otherwise the exit code of the stage that failed.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As in train.py: makes the repository importable, and keeps launch/ itself off the path.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from launch.cli import find_folders, parse_options, to_yaml  # noqa: E402
from launch.pipeline_file import plan_pipeline  # noqa: E402
from launch.process import complain, take_lock  # noqa: E402
from ppo_ds.commands.entry_points import with_commands  # noqa: E402
from ppo_ds.config.schema import resolved  # noqa: E402
from ppo_ds.distributed.child_groups import ChildGroups  # noqa: E402
from ppo_ds.distributed.exit import exit_now  # noqa: E402
from ppo_ds.errors import UserError  # noqa: E402
from ppo_ds.storage.drafts import write_file  # noqa: E402
from ppo_ds.tools.pipeline import SETTINGS, run_pipeline  # noqa: E402


def main(argv: list[str]) -> int:
    try:
        options = parse_options(argv, prog="launch/pipeline.py")
        folders = find_folders(options)
        if options.help is not None:
            print(f"{with_commands(__doc__)}\nAvailable pipelines: {', '.join(folders.options('pipeline'))}")
            return 0
        pipeline, settings = plan_pipeline(folders, options.overrides)
        if options.cfg:
            shown = {job.name: resolved(job.config) for job in pipeline.stages if job.config}
            if settings is not None:
                shown["evaluation"] = settings
            print(to_yaml(shown), end="")
            return 0
        lock = None if pipeline.dry_run else take_lock(pipeline.folder)
        groups = ChildGroups(on_stop=lock.mark_ending if lock else lambda: None)
        if settings is not None:
            write_file(pipeline.folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
        return run_pipeline(pipeline, groups, say=partial(print, flush=True))
    except UserError as error:
        return complain(error)


if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))
