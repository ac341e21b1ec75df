"""Makes rows from tasks of the package reasoning-gym: data.path=reasoning_gym:TASK.

All launches of a run get the same rows: a separate process with a fixed PYTHONHASHSEED makes them, since some
tasks iterate over sets. The process also isolates the run from what tasks print and from their use of global
random generators. This module runs in that process and must not import torch.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from typing import Any

from ppo_ds.config.sections.data import PPODataConfig, is_task
from ppo_ds.config.text import did_you_mean, show
from ppo_ds.distributed.child_groups import PR_SET_PDEATHSIG, prctl
from ppo_ds.errors import UserError

# difference between the seeds of training and held-out rows; row i uses the task's seed + i
HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True)
class TaskRows:
    """Describes a data set whose rows are made by a task of reasoning-gym."""

    path: str  # reasoning_gym:TASK
    settings: dict[str, Any]  # values of the task's keys
    key: str  # of the settings in the config
    max_rows: int | None = None  # None: the task's key "size"
    excluded: tuple[TaskRows, ...] = ()  # rows with a question from these are left out

    def make(self) -> list[dict[str, Any]]:
        """Makes the rows; raises UserError if the task does not exist or refuses its settings."""
        request = {"name": self.path.partition(":")[2], "settings": self.settings, "max_rows": self.max_rows}
        made = rows_or_error(json.dumps(request, default=str))
        where = f"{self.key.replace('task', 'path')}={self.path}"
        if isinstance(made, str):
            raise UserError(made.replace("$KEY", self.key).replace("$PATH", where))
        excluded = {row["prompt"] for other in self.excluded for row in other.make()}
        rows = [row for row in made if row["prompt"] not in excluded]
        if not rows:
            raise UserError(
                f"{where}: all questions are training questions too; choose other values in {self.key}, or a "
                "lower size of the training data"
            )
        return rows


def task_rows(data: PPODataConfig) -> dict[str, TaskRows]:
    """Maps the config keys of data paths to the rows that tasks make for them.

    Held-out rows have the training task's settings but another seed; data.eval_task overrides single keys.
    """
    sets = {"data.path": (data.path, data.task)}
    sets |= {f"data.mix[{i}].path": (part.path, part.task) for i, part in enumerate(data.mix)}
    made = {
        key: TaskRows(str(path), {"seed": 0} | task, key.replace("path", "task"), data.max_samples)
        for key, (path, task) in sets.items()
        if is_task(path)
    }
    if is_task(data.eval_path):
        training = tuple(made.values())
        same = next((rows.settings for rows in training if rows.path == data.eval_path), {"seed": 0})
        settings = same | {"seed": same["seed"] + HELD_OUT_SEED} | data.eval_task
        made["data.eval_path"] = TaskRows(str(data.eval_path), settings, "data.eval_task", None, training)
    return made


@cache
def rows_or_error(request: str) -> list[dict[str, Any]] | str:
    """Runs ``main`` in a new process; returns its rows or error line, cached for later calls of a launch."""
    made = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=request.encode(),
        stdout=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    rows: list[dict[str, Any]] | str = pickle.loads(made.stdout)  # not JSON, which lacks tuples
    return rows


def main() -> None:
    """Reads a request from standard input, and writes rows or an error line to standard output."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the parent, on Linux only
    with redirect_stdout(io.StringIO()):
        try:
            made: list[dict[str, Any]] | str = make_rows(**json.load(sys.stdin))
        except UserError as error:
            made = str(error)
    sys.stdout.buffer.write(pickle.dumps(made))


def make_rows(name: str, settings: dict[str, Any], max_rows: int | None = None) -> list[dict[str, Any]]:
    """Makes the rows of a task: prompt, answer, and the data that reward=reasoning_gym needs to verify.

    Raises UserError, in which the caller must replace $PATH by the path's key and value, and $KEY by the
    config key of ``settings``.
    """
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise UserError(f"$PATH: reasoning-gym has no such task{did_you_mean(name, DATASETS)}")
    keys = [field.name for field in fields(DATASETS[name][1])]
    for key in settings.keys() - set(keys):
        known = f"the keys of {name} are {', '.join(keys)}"
        raise UserError(f"$KEY.{key}={show(settings[key])}: {known}{did_you_mean(key, keys)}")
    try:
        # the parts of the task "composite"
        parts = [{"weight": 1.0, "config": {}} | part for part in settings.get("datasets", [])]
        own = settings | ({"datasets": [DatasetSpec(**part) for part in parts]} if parts else {})
        entries = list(islice(create_dataset(name, **own), max_rows))
    except Exception as error:  # raised by the task's code because of the user's values
        line = " ".join(traceback.format_exception_only(error)[-1].split())
        raise UserError(f"$KEY={show(settings)}: the task {name} cannot make its rows: {line}") from error
    settings_of = {part["name"]: part["config"] for part in parts} or {name: settings}
    rows = []
    for entry in entries:
        task = entry["metadata"]["source_dataset"] if parts else name
        verified = {"settings": settings_of[task], "entry": entry}
        rows.append(
            {"prompt": entry["question"], "answer": entry["answer"], "task": task, "reasoning_gym": verified}
        )
    return rows


if __name__ == "__main__":
    main()
