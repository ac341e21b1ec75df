"""Runs a pipeline: stages, each an ordinary run with its own launcher, and an evaluation at the end.

launch/pipeline.py reads the pipeline's file and the command line, and checks the configs of all stages. This
module starts the processes. It imports neither torch nor Hydra.

pipeline.json in the pipeline's directory records the inputs that each stage has taken from earlier stages, as
sha256 sums, and which stages are done. A stage that is done is not started again, unless its settings have
changed. A stage that was stopped or killed resumes from its own checkpoint. A stage whose inputs have changed
since it began is refused, because its checkpoint was trained with the old inputs.
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
from ppo_ds.storage.drafts import draft_directory, draft_file, remove_drafts, write_file
from ppo_ds.storage.run_directory import DRY_RUN_MARKER, dry_run_directory
from ppo_ds.tools.comparison import table

RECORD = "pipeline.json"
RESULT = "evaluation.json"
SETTINGS = "evaluation_settings.json"  # what the evaluation reads
PUBLISHED = ("model", "curves.png")  # results of the last stage that appear in the pipeline's directory too


@dataclass(frozen=True)
class Summary:
    """The summary.json of a run: why it has ended, and when the file was written."""

    exit_reason: str
    written: int  # in nanoseconds


@dataclass(frozen=True)
class Job:
    """A process of a pipeline: the run of a stage, or the evaluation."""

    name: str
    script: Path
    arguments: list[str]
    ranks: int
    inputs: dict[str, Path]  # keys or names -> files and folders that earlier stages write
    config: Config | None = None  # of a stage

    @property
    def run_dir(self) -> Path:
        """The run directory of a stage."""
        assert self.config is not None
        return Path(str(self.config.run.dir))

    def summary(self) -> Summary | None:
        """Reads the summary.json of a stage; returns None if there is none yet."""
        if self.config is None:
            return None
        file = self.run_dir / "summary.json"
        try:
            reason = json.loads(file.read_text(encoding="utf-8"))["exit_reason"]
            return Summary(str(reason), os.stat(file).st_mtime_ns)
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def command(self, port: int) -> list[str]:
        """Returns the command line; ``port`` connects the ranks."""
        if self.ranks == 1:
            return [sys.executable, str(self.script), *self.arguments]
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[: self.ranks]
        # with --num_gpus, the launcher ignores CUDA_VISIBLE_DEVICES
        chosen = (
            ["--include", f"localhost:{','.join(devices)}"] if devices[0] else ["--num_gpus", str(self.ranks)]
        )
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "-q", *chosen]
        return [*launcher, "--master_port", str(port), str(self.script), *self.arguments]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages have been checked."""

    name: str
    folder: Path
    stages: list[Job]
    evaluation: Job | None
    dry_run: bool


def run_pipeline(pipeline: Pipeline, groups: ChildGroups, say: Callable[[str], None]) -> int:
    """Runs the jobs that are not done and returns the exit code of the pipeline.

    Raises UserError if a stage that has begun would continue with other inputs.
    """
    jobs = [*pipeline.stages, *([pipeline.evaluation] if pipeline.evaluation else [])]
    for number, job in enumerate(jobs, start=1):
        title = f"{pipeline.name}: {job.name} ({number} of {len(jobs)})"
        # dry runs are not recorded; each reads the files of earlier dry runs
        inputs = {} if pipeline.dry_run else {key: digest(path) for key, path in job.inputs.items()}
        if not pipeline.dry_run:
            if is_done(job, pipeline.folder, inputs):
                say(f"pipeline   {title}: is done")
                continue
            check_inputs(job, pipeline.folder, inputs)
            write_record(pipeline.folder, job.name, inputs, done=False)
        before = job.summary()
        with reserved_port() as port:
            command = job.command(port)
            say(f"pipeline   {title}: {shlex.join(command)}")
            code = groups.run(command)
        after = job.summary()
        reason = after.exit_reason if after is not None and after != before else None
        finished = code == 0 and (pipeline.dry_run or job.config is None or reason in FINISHED)
        if finished and not pipeline.dry_run:
            write_record(pipeline.folder, job.name, inputs, done=True)
        if groups.stop_signal is not None:
            say(f"pipeline   {title}: stopped by {groups.stop_signal.name}; the same command continues")
            return 130 if groups.interrupted else 143
        if not finished:
            return report_end(title, code, reason, say)
    if pipeline.dry_run:
        remove_dry_runs(pipeline)
        return 0
    publish(pipeline)
    if pipeline.evaluation is not None:
        say(table(json.loads((pipeline.folder / RESULT).read_text(encoding="utf-8"))))
    return 0


def report_end(title: str, code: int, reason: str | None, say: Callable[[str], None]) -> int:
    """Reports why a job has ended early, and returns the exit code of the pipeline."""
    if code:
        say(f"pipeline   {title}: ended with exit code {code}")
        return code
    if reason is None:
        say(f"error: {title}: ended without a result although its exit code is 0; start the pipeline again")
        return 1
    say(f"pipeline   {title}: ended early (exit_reason {reason}); the same command continues")
    return 0


# -- the record of what is done -----------------------------------------------------------------------------


def is_done(job: Job, folder: Path, inputs: dict[str, str | None]) -> bool:
    """Returns whether a job needs no start: it is recorded as done, with the same inputs and settings.

    Such a stage is nevertheless started if ``run.resume`` is not auto, or if its result is missing. It then
    behaves like any run in a used directory.
    """
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
        and summary.exit_reason in FINISHED
        and (job.run_dir / "model" / "config.json").is_file()
    )


def check_inputs(job: Job, folder: Path, inputs: dict[str, str | None]) -> None:
    """Raises UserError if a stage that has begun took other inputs from earlier stages than these."""
    before = read_record(folder).get(job.name, {}).get("inputs", {})
    if job.config is None or job.config.run.resume == "restart":
        return
    run_dir = job.run_dir
    changed = [key for key, value in inputs.items() if before.get(key, value) != value]
    if changed and (recorded_steps(run_dir) or any((run_dir / "checkpoints").glob("step_*"))):
        raise UserError(
            *[
                f"{job.name}:{key}={job.inputs[key]}: has changed since {run_dir} began; begin that stage "
                f"anew with {job.name}:run.resume=restart, or choose another run.name"
                for key in changed
            ]
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of pipeline.json: the inputs of each job that has begun, and whether it is done."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))["jobs"]
        return {str(name): entry for name, entry in found.items() if isinstance(entry, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(
            f"{folder / RECORD}: is damaged ({type(error).__name__}); delete it: the stages then start "
            "again, and those that are complete end at once"
        ) from error


def write_record(folder: Path, name: str, inputs: dict[str, str | None], done: bool) -> None:
    jobs = read_record(folder) | {name: {"inputs": inputs, "done": done}}
    write_file(folder / RECORD, json.dumps({"jobs": jobs}, indent=2) + "\n")


def digest(path: Path) -> str | None:
    """Returns the sha256 sum of a file, or of all files below a folder; None if there is nothing."""
    if path.is_file():
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    if not path.is_dir():
        return None
    total = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            total.update(f"{file.relative_to(path)} {digest(file)}\n".encode())
    return total.hexdigest()


# -- results ------------------------------------------------------------------------------------------------


def publish(pipeline: Pipeline) -> None:
    """Puts the results of the last stage into the pipeline's directory too, as hard links where possible.

    If an ordinary run has used the directory, its results are kept.
    """
    source, folder = pipeline.stages[-1].run_dir, pipeline.folder
    if source == folder or (folder / "metrics.jsonl").exists():
        return
    for name in PUBLISHED:
        remove_drafts(folder, name=name)
        if (source / name).is_dir():
            if digest(source / name) != digest(folder / name):
                with draft_directory(folder / name) as draft:
                    shutil.copytree(source / name, draft, copy_function=link_or_copy, dirs_exist_ok=True)
        elif (source / name).is_file():
            with draft_file(folder / name) as file:
                file.write((source / name).read_bytes())


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def remove_dry_runs(pipeline: Pipeline) -> None:
    """Removes the files of the dry runs, which were kept for later stages."""
    for job in pipeline.stages:
        folder = dry_run_directory(str(job.run_dir))
        if (folder / DRY_RUN_MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it is not empty if the pipeline has been run before
        pipeline.folder.rmdir()
