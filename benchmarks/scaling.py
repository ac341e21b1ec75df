"""Measures how cost scales with the samples per step, and with the number of ranks.

    python benchmarks/scaling.py
    python benchmarks/scaling.py W1 --prompts 32 64 --ranks 1 2 4 --per-rank 32 --rounds 3 \\
        --set rollout.backend=hf
    python benchmarks/scaling.py --prompts --ranks --same-work 2 8 --samples 1024 --set zero=stage2

By default it runs 32, 128, 512, 2,048 and 4,096 samples on one rank, 128 samples per rank on one and on two
ranks, and 512 samples divided over two and over eight ranks. Each measurement is a run of ppo_step.py in its
own process, with one thread per rank. The cases of a round run one after the other, and medians over rounds
are shown. CPU seconds are those of the steps of all ranks together, without their start. They vary less than
the wall-clock seconds when other programs share the cores. The script uses the standard library only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from benchmarks.options import count
from benchmarks.workloads import WORKLOADS

Case = tuple[int, int]  # number of ranks, samples per step
Times = tuple[float, float]  # wall-clock seconds, and CPU seconds of all ranks
STEP = str(Path(__file__).resolve().with_name("ppo_step.py"))


def main(argv: list[str]) -> int:
    args = parsed(argv)
    rows = [(1, n) for n in args.prompts]
    ranks = [(n, n * args.per_rank) for n in args.ranks]
    same = [(n, args.samples) for n in args.same_work]
    found: dict[Case, list[Times]] = {case: [] for case in dict.fromkeys(rows + ranks + same)}
    for _ in range(args.rounds):
        for case, times in found.items():
            figures = run(args, *case)
            times.append((figures["seconds"]["time/step"], median(figures["cpu_seconds_of_all_ranks"])))
    per_sample = {case: [(a / case[1], b / case[1]) for a, b in times] for case, times in found.items()}
    for title, cases, times in (
        ("seconds per sample", rows, per_sample),
        ("seconds per step, constant samples per rank", ranks, found),
        ("seconds per step, constant samples of all ranks", same, found),
    ):
        if cases:
            print("\n".join(table(title, [(case, times[case]) for case in cases])))
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks/scaling.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("workload", nargs="?", default="W0", choices=sorted(WORKLOADS))
    p.add_argument(
        "--prompts",
        type=count,
        nargs="*",
        default=[32, 128, 512, 2048, 4096],
        help="samples per step on one rank",
    )
    p.add_argument("--ranks", type=count, nargs="*", default=[1, 2], help="numbers of ranks on this machine")
    p.add_argument("--per-rank", type=count, default=128, help="samples per step and rank")
    p.add_argument(
        "--same-work", type=count, nargs="*", default=[2, 8], help="numbers of ranks that share --samples"
    )
    p.add_argument("--samples", type=count, default=512, help="samples per step for --same-work")
    p.add_argument(
        "--steps",
        type=count,
        default=2,
        help="measured steps of a run, after one that is not measured (default 2)",
    )
    p.add_argument("--rounds", type=count, default=1)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    return p.parse_args(argv)


def run(args: argparse.Namespace, ranks: int, prompts: int) -> dict[str, Any]:
    """Runs ppo_step.py once and returns its figures."""
    start = (
        [sys.executable]
        if ranks == 1
        else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    )
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        asked = [
            "--prompts",
            str(prompts),
            "--threads",
            "1",
            "--steps",
            str(args.steps),
            "--no-limits",
            "--json",
            str(found),
            "--folder",
            folder,
        ]
        settings = [part for key in args.set for part in ("--set", key)]
        done = subprocess.run(
            [*start, STEP, args.workload, *asked, *settings], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"{ranks} rank(s), {prompts} samples: exit code {done.returncode}\n"
                f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return json.loads(found.read_text(encoding="utf-8"))


def table(title: str, cases: Sequence[tuple[Case, Sequence[Times]]]) -> list[str]:
    """Formats the median times of each case; a ratio is the median over rounds of case / first case."""
    lines = [
        "",
        title,
        f"{'ranks':>8}{'samples':>10}{'seconds':>12}{'range':>22}{'x first':>14}"
        f"{'CPU seconds':>14}{'x first':>14}",
    ]
    for (ranks, samples), times in cases:
        clock, cpu = zip(*times, strict=True)
        ratios = [
            median(mine[i] / first[i] for mine, first in zip(times, cases[0][1], strict=True)) for i in (0, 1)
        ]
        spread = f"{min(clock):.4f} to {max(clock):.4f}"
        lines.append(
            f"{ranks:>8}{samples:>10}{median(clock):>12.4f}{spread:>22}{ratios[0]:>14.2f}"
            f"{median(cpu):>14.4f}{ratios[1]:>14.2f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
