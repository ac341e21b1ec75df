"""Compares the doctor's estimate of time with measured phases, on the CPU of this machine.

    python benchmarks/estimate_check.py W1 W2
    python benchmarks/estimate_check.py W1 --rounds 5 --threads 2 --assume mfu=0.5

Each round measures the rates of the machine, runs benchmarks/ppo_step.py in a process of its own, and
measures the rates again; the estimate uses the mean of both. With one thread, both count CPU seconds, so that
other programs on the same cores affect them less. The table has medians over the rounds, and the range of
the ratio of estimate and measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]
STEP = str(ROOT / "benchmarks" / "ppo_step.py")
MIN_SHARE = 0.01  # phases below this share of the step are not compared

Times = dict[str, float]  # seconds by phase


def main(argv: list[str]) -> int:
    args = parsed(argv)
    for name in args.workloads:
        rounds = [compare(name, args) for _ in range(args.rounds)]
        print(table(name, rounds), flush=True)
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks/estimate_check.py", description=__doc__, allow_abbrev=False)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("workloads", nargs="+", choices=["W0", "W1", "W2"])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=2, help="measured steps of each run (default 2)")
    p.add_argument("--threads", type=int, default=1, help="threads of the run (default 1)")
    p.add_argument("--assume", nargs="+", default=[], metavar="NAME=VALUE", help="as for launch/doctor.py")
    p.add_argument("--folder", type=Path, help="folder of models and runs; default: outputs/benchmarks")
    return p.parse_args(argv)


def compare(name: str, args: argparse.Namespace) -> tuple[Times, Times]:
    """Returns the estimated and the measured seconds of one round."""
    folder = (args.folder or Path("outputs/benchmarks")) / name
    options = [name, "--threads", str(args.threads), "--steps", str(args.steps), "--folder", str(folder)]
    subprocess.run([sys.executable, STEP, *options, "--prepare-only"], check=True)
    estimator = Estimator(options, args)
    before = estimator.rates()
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "step.json"
        # with one thread, seconds in which other programs have the core are not counted
        clock = ["--cpu-seconds"] if args.threads == 1 else []
        command = [sys.executable, STEP, *options, *clock, "--no-limits", "--json", str(result)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    measured = {phase.removeprefix("time/"): seconds for phase, seconds in found["seconds"].items()}
    estimated = estimator.estimate([before, estimator.rates()])
    # of the estimated phases only: other phases take below 1 % of a step
    measured["step"] = sum(measured[phase] for phase in estimated if phase != "step")
    return estimated, measured


class Estimator:
    """Estimates the phases of a workload's run with the doctor's functions."""

    def __init__(self, options: list[str], args: argparse.Namespace):
        from benchmarks.options import overrides, workload_of
        from benchmarks.options import parsed as parsed_step
        from launch.cli import load_config
        from ppo_ds.planning.budgets import with_cpu_limits
        from ppo_ds.planning.run_memory import Hardware
        from ppo_ds.tools.doctor.ppo import plan_ppo
        from ppo_ds.tools.doctor.report import Report
        from ppo_ds.tools.doctor.step_time import read_assumptions

        step = parsed_step(options)
        self.config = with_cpu_limits(load_config(overrides(step)))
        mean = workload_of(step).mean_tokens
        given = [] if mean is None else [f"response={mean}"]
        self.assumed = read_assumptions([*given, *args.assume], on_gpu=False)
        report = Report()
        plan = plan_ppo(self.config, Hardware(1, None), report)
        assert plan is not None, report.lines
        self.plan, self.threads = plan, args.threads

    def rates(self) -> Any:
        from ppo_ds.tools.doctor.cluster import cpu_device

        clock = time.process_time if self.threads == 1 else None
        return cpu_device(self.plan.main, self.config.actor.model.dtype, 1, self.threads, clock)

    def estimate(self, measured: list[Any]) -> Times:
        """Returns the estimate with the mean of measured rates."""
        from ppo_ds.tools.doctor.step_time import Machine

        means = {
            each.name: sum(getattr(device, each.name) for device in measured) / len(measured)
            for each in fields(measured[0])
            if isinstance(getattr(measured[0], each.name), float)
        }
        machine = Machine(replace(measured[0], **means), self.assumed, 1, 1, on_gpu=False)
        phases = self.plan.step_time(self.config, machine, self.plan.estimate(self.config)).phases()
        seconds = {name: phase.seconds for name, phase in phases.items()}
        return seconds | {"step": sum(seconds.values())}


def table(name: str, rounds: list[tuple[Times, Times]]) -> str:
    """Formats the medians over rounds, and the ratios of estimate and measurement."""
    lines = [f"{name:<14}{'estimated':>10}{'measured':>10}{'ratio':>8}{'range':>16}"]
    step = median(measured["step"] for _, measured in rounds)
    for phase in rounds[0][0]:
        estimated = median(each[phase] for each, _ in rounds)
        measured = median(each.get(phase, 0.0) for _, each in rounds)
        if measured < MIN_SHARE * step:
            continue
        ratios = [each[phase] / other[phase] for each, other in rounds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"{phase:<14}{estimated:>10.3f}{measured:>10.3f}{median(ratios):>8.2f}{spread:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
