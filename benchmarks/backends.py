"""Compares two decode backends: the seconds of generation, and the seconds and bytes of a switch of weights.

    .venv-vllm/bin/python benchmarks/backends.py W2 --threads 1

Runs of benchmarks/ppo_step.py with one backend and with the other alternate, each in its own process. Ratios
are computed for each pair of runs, so that drifts in the speed of the machine cancel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

PPO_STEP = Path(__file__).resolve().parent / "ppo_step.py"


def main(argv: list[str]) -> int:
    args = parsed(argv)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    print(f"{'pair':<6}{args.first + ', s':>12}{args.second + ', s':>12}{'ratio':>8}", flush=True)
    for number in range(args.pairs):
        first, second = (measured(args, backend) for backend in (args.first, args.second))
        pairs.append((first, second))
        print(
            f"{number + 1:<6}{first['generate']:>12.2f}{second['generate']:>12.2f}"
            f"{first['generate'] / second['generate']:>8.2f}",
            flush=True,
        )
    ratios = [first["generate"] / second["generate"] for first, second in pairs]
    print(
        f"\nseconds of generation, {args.first} over {args.second}: median {median(ratios):.2f}, "
        f"from {min(ratios):.2f} to {max(ratios):.2f}"
    )
    for place, backend in enumerate((args.first, args.second)):
        switches = [pair[place]["switch"] for pair in pairs]
        gigabytes = pairs[0][place]["switch_gb"]
        print(
            f"switch with {backend}: median {median(switches):.4f} s, from {min(switches):.4f} to "
            f"{max(switches):.4f}; {gigabytes * 1024:.1f} MiB"
        )
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks/backends.py", description=__doc__, allow_abbrev=False)
    p.add_argument("workload", help="a workload of benchmarks/ppo_step.py")
    p.add_argument("--first", default="static", help="default: static")
    p.add_argument("--second", default="vllm", help="default: vllm")
    p.add_argument("--pairs", type=int, default=5, help="pairs of runs; default 5")
    p.add_argument("--threads", type=int, default=1, help="threads of each run; default 1")
    p.add_argument("--dry", action="store_true", help="tiny sizes, to test that it runs")
    return p.parse_args(argv)


def measured(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Returns the medians over the steps of one run with ``backend``."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(PPO_STEP), args.workload, "--no-limits", "--json", str(result)]
        command += ["--threads", str(args.threads), "--set", f"rollout.backend={backend}"]
        done = subprocess.run(
            [*command, *(["--dry"] if args.dry else [])], capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            raise SystemExit(f"error: ppo_step.py with {backend} failed: {done.stderr[-2000:]}")
        found = json.loads(result.read_text(encoding="utf-8"))
    steps = found["seconds_per_step"]
    return {
        "generate": median(step["time/generate"] for step in steps),
        "switch": median(step["time/switch"] for step in steps),
        "switch_gb": found["metrics"]["perf/switch_gb"],
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
