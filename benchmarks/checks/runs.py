"""The parts of a check: commands, what they leave behind, a judge, and the faults that it must detect."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from benchmarks.options import overrides, parsed

ROOT = Path(__file__).resolve().parents[2]
STEP, TRAIN, VARIANTS = "benchmarks/ppo_step.py", "launch/train.py", "benchmarks/checks/variants.py"
CPU_MINUTES = 10.0  # time limit of each run on a CPU
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A command of a check. ``{out}`` in an argument or variable stands for the folder of results."""

    name: str
    command: Sequence[str]  # arguments of Python
    minutes: float = 1.5  # time limit
    environment: Mapping[str, str] = field(default_factory=dict)
    run_dir: str | None = None  # run directory, relative to the folder of results
    starts_anew: bool = True  # the run directory is deleted first
    codes: Sequence[int] = (0,)  # exit codes that are no failure
    gpus: int = 1  # number of visible GPUs


@dataclass(frozen=True)
class Result:
    """What a run has left behind."""

    code: int | None  # exit code; None: killed at the time limit
    seconds: float
    log: str
    steps: list[Metrics] = field(default_factory=list)  # lines of metrics.jsonl

    def median(self, name: str) -> float:
        """Returns the median of a metric over the steps, the first excluded if there are several."""
        values = [step[name] for step in self.steps[1:] or self.steps if name in step]
        return statistics.median(values) if values else math.nan

    def peaks(self) -> list[float]:
        """Returns the peak memory in GiB by step: reserved on a GPU, resident on a CPU."""
        return [step.get("mem/reserved_peak_gb", step["mem/host_rss_gb"]) for step in self.steps]


Results = Mapping[str, Result]
Verdict = tuple[bool, str]
Judge = Callable[[Results], Verdict]


@dataclass(frozen=True)
class Fault:
    """A defect that a check must detect: runs that replace those of the same name, then changed results."""

    name: str
    runs: Sequence[Run] = ()
    change: Callable[[Results], Results] = lambda results: results


@dataclass(frozen=True)
class Check:
    """Runs, and a function that returns what they show and whether that is as expected."""

    block: str
    question: str
    runs: Sequence[Run]
    judge: Judge
    faults: Sequence[Fault] = ()
    needs: str | None = None  # package without which the check is skipped
    only_on_gpu: str | None = None  # why the check is skipped on a CPU

    @property
    def minutes(self) -> float:
        return sum(run.minutes for run in self.runs)

    @property
    def gpus(self) -> int:
        return max(run.gpus for run in self.runs)

    def verdict(self, results: Results) -> Verdict:
        """Judges the results, after their exit codes."""
        failed = [run.name for run in self.runs if results[run.name].code not in run.codes]
        if failed:
            return (
                False,
                f"unexpected exit code of {', '.join(failed)} (None: killed at the time limit); see the logs",
            )
        try:
            return self.judge(results)
        except (LookupError, StopIteration, ValueError, ZeroDivisionError) as error:
            return False, f"the results could not be read ({error!r}); see the logs"


# ---- commands


def launcher(ranks: int) -> list[str]:
    """Returns the arguments of Python that start a script on several ranks; none for one rank."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return start if ranks > 1 else []


def folder_of(workload: str, options: Sequence[str]) -> str:
    """Returns the name of the folder of a workload's models; tiny ones have a folder of their own."""
    return workload + "_dry" * ("--dry" in options)


def step_run(
    name: str,
    workload: str,
    *settings: str,
    steps: int = 1,
    minutes: float = 1.5,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    codes: Sequence[int] = (0,),
    folder: str | None = None,
    ranks: int = 1,
) -> Run:
    """Makes a run of benchmarks/ppo_step.py.

    Runs of a workload use the same models and prompts, unless ``folder`` names another folder for them.
    """
    folder = folder or folder_of(workload, options)
    command = [*launcher(ranks), STEP, workload, "--steps", str(steps), "--no-limits", *options]
    command += ["--folder", f"{{out}}/{folder}"]
    for setting in settings:
        command += ["--set", setting]
    return Run(name, command, minutes, environment or {}, f"{folder}/run", codes=codes, gpus=ranks)


def prepare_run(workload: str, options: Sequence[str], minutes: float = 1.0) -> Run:
    """Makes a run that writes the models and prompts of a workload."""
    folder = f"{{out}}/{folder_of(workload, options)}"
    return Run("prepare", [STEP, workload, "--prepare-only", *options, "--folder", folder], minutes)


def trainer_keys(workload: str, *options: str) -> list[str]:
    """Returns the config of a workload for launch/train.py and launch/doctor.py, without run.*."""
    keys = overrides(parsed([workload, *options, "--folder", "FOLDER"]))
    folder = str(Path("FOLDER").resolve())
    return [
        key.replace(folder, f"{{out}}/{folder_of(workload, options)}")
        for key in keys
        if not key.startswith(("run.", "checkpoint.", "actor.optim.lr="))
    ]


def train_run(
    name: str, run_dir: str, options: Sequence[str], *settings: str, ranks: int = 1, minutes: float = 1.5
) -> Run:
    """Makes a run of four steps of launch/train.py on the models and prompts of W1."""
    keys = [*trainer_keys("W1", *options), f"run.dir={{out}}/{run_dir}", "run.steps=4", "checkpoint.every=2"]
    keys += ["actor.optim.lr=1e-4", "run.deterministic=true", *settings]
    command = [*launcher(ranks), TRAIN, *keys]
    return Run(name, command, minutes, run_dir=run_dir, gpus=ranks)


def doctor_run(workload: str, options: Sequence[str], *settings: str, gpus: int = 1, on_cpu: bool) -> Run:
    """Makes a run of launch/doctor.py for the GPUs of this machine, or for as many ranks on its CPU."""
    keys = [*trainer_keys(workload, *options), "run.dir={out}/doctor", "run.steps=2", *settings]
    command = ["launch/doctor.py", *keys, *(["--nodes", str(gpus)] if on_cpu and gpus > 1 else [])]
    return Run("doctor", command, 1.0, codes=(0, 1), gpus=gpus)  # 1: it does not fit, by the estimate


def varied(run: Run, *variants: str) -> Run:
    """Returns the run with its script changed by functions of variants.py."""
    command = list(run.command)
    if VARIANTS in command:
        command[command.index(VARIANTS) + 1] += "," + ",".join(variants)
    else:
        script = next(i for i, argument in enumerate(command) if argument.endswith(".py"))
        command[script:script] = [VARIANTS, ",".join(variants)]
    return replace(run, command=command)


def with_environment(run: Run, **variables: str) -> Run:
    return replace(run, environment={**run.environment, **variables})


# ---- running


def execute(run: Run, out: Path, on_cpu: bool) -> Result:
    """Runs a command within its time limit and reads its metrics."""
    out.mkdir(parents=True, exist_ok=True)
    run_dir = out / run.run_dir if run.run_dir else None
    if run_dir and run.starts_anew:
        shutil.rmtree(run_dir, ignore_errors=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment |= {name: value.replace("{out}", str(out)) for name, value in run.environment.items()}
    # only as many GPUs as ranks; the doctor counts all that are visible
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(i) for i in range(run.gpus)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[: run.gpus])
    if on_cpu:
        # one thread: on a busy machine, threads that wait for one another cost minutes
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *(argument.replace("{out}", str(out)) for argument in run.command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        log, _ = process.communicate(timeout=60 * (max(CPU_MINUTES, run.minutes) if on_cpu else run.minutes))
        code = process.returncode
    except subprocess.TimeoutExpired:
        # torchrun starts each rank in a session of its own
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        log, _ = process.communicate()
        code = None
    file = run_dir / "metrics.jsonl" if run_dir else None
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    return Result(code, time.monotonic() - start, log, [json.loads(line) for line in lines])
