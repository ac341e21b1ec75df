"""Runs a pipeline: stages, each an ordinary run with a separate launcher, and an evaluation at the end.

pipeline.json in the pipeline's directory records which jobs are done. For each job, it also records a sha256
sum of the models of earlier stages, as they were when the job began. Imports neither torch nor Hydra.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_ds.config.resume import changes
from ppo_ds.config.schema import Config, resolved
from ppo_ds.distributed.child_groups import ChildGroups
from ppo_ds.distributed.launcher import reserved_port
from ppo_ds.errors import UserError
from ppo_ds.run.record import FINISHED, recorded_settings, recorded_steps
from ppo_ds.storage.drafts import write_file
from ppo_ds.storage.reading import read_json
from ppo_ds.storage.run_directory import DRY_RUN_MARKER, dry_run_directory

RECORD = "pipeline.json"
RESULT = "evaluation.json"


@dataclass(frozen=True)
class Job:
    """A process of a pipeline: the run of a stage, or the evaluation."""

    name: str
    script: Path
    arguments: list[str]
    ranks: int
    config: Config | None = None  # of a stage; None for the evaluation

    @property
    def run_dir(self) -> Path:
        assert self.config is not None
        return Path(str(self.config.run.dir))

    def summary(self) -> tuple[str, int] | None:
        """Returns the exit reason in a stage's summary.json and the time of the file in ns, or None."""
        if self.config is None:
            return None
        file = self.run_dir / "summary.json"
        try:
            reason = read_json(file)["exit_reason"]
            return str(reason), os.stat(file).st_mtime_ns
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def command(self, port: int) -> list[str]:
        """Returns the command line that starts the process, whose ranks connect through ``port``."""
        if self.ranks == 1:
            return [sys.executable, str(self.script), *self.arguments]
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[: self.ranks]
        chosen = "--num_gpus", str(self.ranks)
        if devices[0]:  # with --num_gpus, the launcher ignores CUDA_VISIBLE_DEVICES
            chosen = "--include", f"localhost:{','.join(devices)}"
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "-q", *chosen]
        return [*launcher, "--master_port", str(port), str(self.script), *self.arguments]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages have been checked."""

    name: str
    folder: Path
    jobs: list[Job]  # the stages and then the evaluation, if there is one
    dry_run: bool


def run_pipeline(pipeline: Pipeline, groups: ChildGroups, say: Callable[[str], None]) -> int:
    """Runs the jobs that are not done and returns the exit code of the pipeline.

    Raises UserError if a stage would be continued after models of the stages before it have changed.
    """
    models = hashlib.sha256()  # of the stages so far
    for number, job in enumerate(pipeline.jobs, start=1):
        title = f"pipeline   {pipeline.name}: {job.name} ({number} of {len(pipeline.jobs)})"
        if job.config is None:
            models.update(json.dumps(job.arguments).encode())
        inputs = models.hexdigest()
        if pipeline.dry_run or not is_done(job, pipeline.folder, inputs):
            code = run_job(job, pipeline, groups, inputs, title, say)
            if code is not None:
                return code
        else:
            say(f"{title}: is done")
        if job.config is not None and not pipeline.dry_run:
            add_files(models, job.run_dir / "model")
    if pipeline.dry_run:
        remove_dry_runs(pipeline)
    return 0


def run_job(
    job: Job, pipeline: Pipeline, groups: ChildGroups, inputs: str, title: str, say: Callable[[str], None]
) -> int | None:
    """Runs a job; returns None if the pipeline may go on, or the exit code with which it must end now."""
    if not pipeline.dry_run:  # dry runs are not recorded
        check_inputs(job, pipeline.folder, inputs)
        write_record(pipeline.folder, job.name, inputs, done=False)
    before = job.summary()
    with reserved_port() as port:
        command = job.command(port)
        say(f"{title}: {shlex.join(command)}")
        code = groups.run(command)
    after = job.summary()
    reason = after[0] if after is not None and after != before else None
    finished = code == 0 and (pipeline.dry_run or job.config is None or reason in FINISHED)
    if finished and not pipeline.dry_run:
        write_record(pipeline.folder, job.name, inputs, done=True)
    if groups.stop_signal is not None:
        say(f"{title}: stopped by {groups.stop_signal.name}; the same command continues")
        return 130 if groups.interrupted else 143
    if finished:
        return None
    if code:
        say(f"{title}: ended with exit code {code}")
    elif reason is None:
        say(f"{title}: ended without a result although its exit code is 0; start the pipeline again")
        return 1
    else:
        say(f"{title}: ended early (exit_reason {reason}); the same command continues")
    return code


# -- the record of what is done -----------------------------------------------------------------------------


def is_done(job: Job, folder: Path, inputs: str) -> bool:
    """Returns whether a job can be skipped: done with these inputs and settings, and its result exists."""
    if read_record(folder).get(job.name) != {"inputs": inputs, "done": True}:
        return False
    if job.config is None:
        return (folder / RESULT).is_file()
    before, summary = recorded_settings(job.run_dir), job.summary()
    return (
        job.config.run.resume == "auto"
        and before is not None
        and not changes(before, resolved(job.config))
        and summary is not None
        and summary[0] in FINISHED
        and (job.run_dir / "model" / "config.json").is_file()
    )


def check_inputs(job: Job, folder: Path, inputs: str) -> None:
    """Raises UserError if a stage would resume a run that began with inputs other than ``inputs``."""
    if job.config is None or job.config.run.resume == "restart":
        return
    begun = recorded_steps(job.run_dir) or any((job.run_dir / "checkpoints").glob("step_*"))
    if begun and read_record(folder).get(job.name, {}).get("inputs", inputs) != inputs:
        raise UserError(
            f"{job.name}: the model of an earlier stage has changed since {job.run_dir} began; begin this "
            f"stage anew with {job.name}:run.resume=restart, or choose another run.name"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of pipeline.json: the inputs of each job that has begun, and whether it is done."""
    try:
        found = read_json(folder / RECORD)["jobs"]
        return {str(name): entry for name, entry in found.items() if isinstance(entry, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(
            f"{folder / RECORD}: is damaged ({error}); delete it: the stages then start "
            "again, and those that are complete end at once"
        ) from error


def write_record(folder: Path, name: str, inputs: str, done: bool) -> None:
    jobs = read_record(folder) | {name: {"inputs": inputs, "done": done}}
    write_file(folder / RECORD, json.dumps({"jobs": jobs}, indent=2) + "\n")


def add_files(total: Any, folder: Path) -> None:
    """Adds the names and the contents of all files below a folder to a hash."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            total.update(f"{path.relative_to(folder)} {digest}\n".encode())


def remove_dry_runs(pipeline: Pipeline) -> None:
    """Removes the files of the dry runs, which were kept for later stages."""
    for job in pipeline.jobs:
        folder = dry_run_directory(str(job.run_dir))
        if (folder / DRY_RUN_MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty if the pipeline has been run before
        pipeline.folder.rmdir()
