"""Whether cost grows as the work does: seconds per sample for more samples a step, and for more ranks with as many samples each.

    python benchmarks/scaling.py                              # 32, 128 and 512 samples on one rank; 128 on each of one and two
    python benchmarks/scaling.py W1 --prompts 32 64 --ranks 1 2 4 --per-rank 32 --rounds 3 --set rollout.backend=hf

Each figure is a run of ppo_step.py with one thread a rank, in a process of its own. Rounds are in turn; medians are shown. Where other programs share
the cores, CPU seconds (of rank 0) waver less. The standard library only.
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

Case = tuple[int, int]  # ranks, samples of a step
Times = tuple[float, float]  # seconds on the clock, and of rank 0's CPU
STEP = str(Path(__file__).resolve().with_name("ppo_step.py"))


def main(argv: list[str]) -> int:
    args = parsed(argv)
    rows = [(1, n) for n in args.prompts]
    ranks = [(count, count * args.per_rank) for count in args.ranks]
    found: dict[Case, list[Times]] = {case: [] for case in dict.fromkeys(rows + ranks)}
    for _ in range(args.rounds):
        for case, times in found.items():
            figures = run(args, *case)
            times.append((figures["seconds"]["time/step"], median(figures["cpu_seconds"])))
    print(
        "\n".join(
            table(
                "seconds per sample",
                [(case, [(a / case[1], b / case[1]) for a, b in found[case]]) for case in rows],
            )
        )
    )
    print(
        "\n".join(
            table("seconds of a step, as many samples on each rank", [(case, found[case]) for case in ranks])
        )
    )
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="benchmarks/scaling.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("workload", nargs="?", default="W0")
    p.add_argument(
        "--prompts", type=int, nargs="*", default=[32, 128, 512], help="samples of a step, on one rank"
    )
    p.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="on this machine")
    p.add_argument("--per-rank", type=int, default=128, help="samples of a step on each of them")
    p.add_argument(
        "--steps", type=int, default=2, help="measured steps of a run, after one that is not (default 2)"
    )
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    return p.parse_args(argv)


def run(args: argparse.Namespace, ranks: int, prompts: int) -> dict[str, Any]:
    """The figures of one run of ppo_step.py."""
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
                f"{ranks} rank(s), {prompts} samples: ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return json.loads(found.read_text(encoding="utf-8"))


def table(title: str, cases: Sequence[tuple[Case, Sequence[Times]]]) -> list[str]:
    """Each case with its times, one for each round; ratios are to the first case, round by round."""
    lines = [
        "",
        title,
        f"{'ranks':>8}{'samples':>10}{'seconds':>12}{'range':>22}{'to the first':>14}{'CPU seconds':>14}{'to the first':>14}",
    ]
    for (ranks, samples), times in cases:
        clock, cpu = zip(*times, strict=True)
        ratios = [
            median(mine[i] / first[i] for mine, first in zip(times, cases[0][1], strict=True)) for i in (0, 1)
        ]
        spread = f"{min(clock):.4f} to {max(clock):.4f}"
        lines.append(
            f"{ranks:>8}{samples:>10}{median(clock):>12.4f}{spread:>22}{ratios[0]:>14.2f}{median(cpu):>14.4f}{ratios[1]:>14.2f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
