"""Measures a PPO step on a busy machine, with several settings of the OpenMP runtime.

    python benchmarks/busy.py W1
    python benchmarks/busy.py W0 --threads 2 --busy 0 2 4 --rounds 7 \\
        --setting spin:GOMP_SPINCOUNT=300000 --setting short:GOMP_SPINCOUNT=1000

One trainer is started for each setting. They take their steps in turn, so that drifts in the speed of the
machine affect all settings. The steps are repeated beside each number of ``--busy`` processes, which are
endless loops that compete for the cores. Medians and ranges are shown, and the ratio of each setting to the
first one, which is the median over rounds. Without ``--setting``, the defaults of the OpenMP runtime are
compared with those of ppo_ds. See docs/dev/performance.md, "Threads on a busy machine".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

from benchmarks.options import count, overrides
from benchmarks.options import parsed as parsed_step
from benchmarks.workloads import WORKLOADS

WORKER = "--worker"  # first argument of a trainer that this script starts
# the program of a busy process, which ends with the process that started it
LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
# the columns of the table, and the fields of a measured step
COLUMNS = {"seconds": "seconds", "cpu": "CPU s", "yielded": "waits", "preempted": "preempted"}
Step = Mapping[str, float]


def main(argv: list[str]) -> int:
    if argv[:1] == [WORKER]:
        return work(argv[1:])
    args = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes that this one has started
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asked = [args.workload, "--folder", str(args.folder or folder), *(["--dry"] if args.dry else [])]
        asked += ["--threads", str(args.threads)] if args.threads else []
        asked += ["--prompts", str(args.prompts)] if args.prompts else []
        asked += [part for key in args.set for part in ("--set", key)]
        step = str(ROOT / "benchmarks" / "ppo_step.py")
        if code := subprocess.run([sys.executable, step, *asked, "--prepare-only"]).returncode:
            return code
        trainers = {
            name: stack.enter_context(trainer(asked, variables, Path(folder) / name))
            for name, variables in args.setting
        }
        for loops in args.busy:
            with busy(loops):
                # The control of ppo_ds measures every 20 s. The first steps also allocate memory.
                end = time.monotonic() + args.settle
                while time.monotonic() < end:
                    measure(trainers, rounds=1)
                found = measure(trainers, args.rounds)
            print("\n".join(table(loops, found)), flush=True)
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks/busy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("workload", nargs="?", default="W1", choices=sorted(WORKLOADS))
    p.add_argument("--threads", type=count, help="threads of each trainer; default: all cores")
    p.add_argument("--prompts", type=count, help="prompts of one PPO step; default: the workload's")
    p.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4], help="numbers of busy processes")
    p.add_argument("--settle", type=float, default=25.0, help="seconds of steps before each measurement")
    p.add_argument("--rounds", type=count, default=5, help="steps of each trainer beside each number")
    p.add_argument(
        "--setting",
        type=setting,
        action="append",
        metavar="NAME:VARIABLE=VALUE,...",
        help="environment variables of a trainer",
    )
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    p.add_argument("--folder", type=Path, help="folder of models and prompts; default: a temporary folder")
    p.add_argument("--dry", action="store_true", help="tiny sizes")
    args = p.parse_args(argv)
    args.setting = args.setting or [setting("runtime:GOMP_SPINCOUNT=300000"), setting("ppo_ds:")]
    names = [name for name, _ in args.setting]
    if twice := [name for name in names if names.count(name) > 1]:
        p.error(f"--setting {twice[0]}: given twice; give each setting a name of its own")
    return args


def setting(text: str) -> tuple[str, dict[str, str]]:
    """Parses NAME:VARIABLE=VALUE,VARIABLE=VALUE."""
    name, _, values = text.partition(":")
    return name, dict(value.split("=", 1) for value in values.split(",") if value)


# -- a trainer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """A process that takes a step for each line that it reads, and the file of its output."""

    process: subprocess.Popen[str]
    log: Path


@contextmanager
def trainer(asked: Sequence[str], variables: Mapping[str, str], log: Path) -> Iterator[Trainer]:
    """Starts a trainer that takes a step for each line that it reads."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, WORKER, *asked, "--set", f"run.dir={log}.run"],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        yield Trainer(process, log)
    finally:
        process.kill()
        process.wait()


def next_step(trainer: Trainer) -> Step:
    process = trainer.process
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):  # it has ended: readline returns nothing
        process.stdin.write("\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        with suppress(BrokenPipeError):  # of the line that could not be written
            process.stdin.close()
        last = "\n".join(trainer.log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(
            f"{last}\nerror: the trainer {trainer.log.name} ended with exit code {process.wait()}; the last "
            "lines of its output are above"
        )
    return json.loads(answer)


def work(argv: list[str]) -> int:
    """Trains, one step for each line of the standard input, and prints the time that each step took."""
    from launch.cli import load_config
    from launch.process import exit_now, prepare_environment

    args = parsed_step([*argv, "--steps", "1000000"])
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        config = load_config(overrides(args))
        prepare_environment(config.run.verbose, trains=True)
        from ppo_ds.assemble.run import build_run

        run = build_run(config)
        step = run.stage.step

        def step_on_request(index: int) -> Any:
            if not sys.stdin.readline():
                exit_now(0)
            before = usage()
            result = step(index)
            print(
                json.dumps({name: value - before[name] for name, value in usage().items()}),
                file=answers,
                flush=True,
            )
            return result

        run.stage.step = step_on_request
        run.fit()
    return 0


def usage() -> Step:
    """Returns what this process has used so far, with all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.perf_counter(),
        "cpu": used.ru_utime + used.ru_stime,
        "yielded": used.ru_nvcsw,
        "preempted": used.ru_nivcsw,
    }


# -- measurement ---------------------------------------------------------------------------------------------


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Runs endless loops meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        time.sleep(0.5 * (loops > 0))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(trainers: Mapping[str, Trainer], rounds: int) -> dict[str, list[Step]]:
    """Lets the trainers take ``rounds`` steps in turn; every second round is in reverse order."""
    found: dict[str, list[Step]] = {name: [] for name in trainers}
    for i in range(rounds):
        for name in list(trainers)[:: -1 if i % 2 else 1]:
            found[name].append(next_step(trainers[name]))
    return found


def table(loops: int, found: Mapping[str, Sequence[Step]]) -> list[str]:
    """Formats medians and ranges."""
    first = next(iter(found.values()))
    titles = "".join(f"{title:>12}" for title in COLUMNS.values())
    lines = ["", f"{loops} busy processes", f"{'setting':<14}{titles}{'range, s':>18}{'x first':>10}"]
    for name, steps in found.items():
        seconds = [step["seconds"] for step in steps]
        ratio = median(a / b["seconds"] for a, b in zip(seconds, first, strict=True))
        values = [median(step[column] for step in steps) for column in COLUMNS]
        numbers = "".join(f"{value:>12.2f}" if i < 2 else f"{value:>12.0f}" for i, value in enumerate(values))
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        lines.append(f"{name:<14}{numbers}{spread:>18}{ratio:>10.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
