"""Runs the pipeline of test_pipeline.py in a process of its own, which can be stopped: FOLDER"""

import sys
from pathlib import Path

from ppo_ds.distributed.child_groups import ChildGroups
from ppo_ds.tools.pipeline import run_pipeline
from tests.tools.test_pipeline import pipeline_in

if __name__ == "__main__":
    sys.exit(run_pipeline(pipeline_in(Path(sys.argv[1])), ChildGroups(), print))
