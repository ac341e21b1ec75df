"""Compares data.difficulty with uniform sampling: GRPO on the sums of the quickstart.

    python benchmarks/difficulty.py --seeds 0 1 2

The runs of a seed start from the same weights, on one of two sets of prompts: ``plain`` has all sums of the
quickstart; in ``mixed`` two thirds of 1,200 sums have an expected answer that cannot be written with the
tokens of the model. The table has the greedy accuracy on held-out sums. A complete run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from ppo_ds.examples.sums import prepare, write_jsonl

SETS = ("plain", "mixed")
KINDS = {"uniform": [], "difficulty": ["data.difficulty.floor=0.1"]}
SETTINGS = (
    *("+experiment=quickstart", "algo=grpo", "algo.minibatch_size=128", "prepare=null"),
    *("rollout.prompts_per_step=64", "rollout.samples_per_prompt=8", "tracker.samples=0", "run.threads=1"),
)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="benchmarks/difficulty.py", description=__doc__.split("\n")[0])
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    p.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="default: both")
    p.add_argument("--solvable", type=int, default=400, help="of the mixed set (default %(default)s)")
    p.add_argument("--unsolvable", type=int, default=800, help="of the mixed set (default %(default)s)")
    p.add_argument("--steps", type=int, default=60, help="steps of a run (default %(default)s)")
    p.add_argument("--folder", type=Path, default=Path("outputs/difficulty"), help="default: %(default)s")
    args = p.parse_args(argv)
    for name in args.sets:
        curves = {kind: [train(args, name, kind, seed) for seed in args.seeds] for kind in KINDS}
        print(f"\n{name} set, {len(args.seeds)} seed(s): held-out accuracy in percent")
        print(f"  step  {'  '.join(KINDS)}")
        for step in curves["uniform"][0]:
            means = [100 * mean(curve[step] for curve in found) for found in curves.values()]
            print(f"  {step:4}  {means[0]:7.1f}  {means[1]:10.1f}")
    return 0


def train(args: argparse.Namespace, name: str, kind: str, seed: int) -> dict[int, float]:
    """Trains in a process of its own, and returns the held-out accuracy by step."""
    start, run_dir = (args.folder / part for part in (f"start_{seed}", f"{name}_{kind}_{seed}"))
    prepare(str(start), seed=seed)
    rows = [json.loads(line) for line in (start / "train.jsonl").read_text().splitlines()]
    unsolvable = rows[args.solvable : args.solvable + args.unsolvable]
    wrong = [row | {"answer": "none"} for row in unsolvable]
    write_jsonl(start / "mixed.jsonl", rows[: args.solvable] + wrong)
    paths = {
        "run.dir": run_dir,
        "actor.model.path": start / "model",
        "data.path": start / ("train.jsonl" if name == "plain" else "mixed.jsonl"),
        "data.eval_path": start / "heldout.jsonl",
    }
    given = [f"{key}={path.resolve()}" for key, path in paths.items()]
    more = [f"run.seed={seed}", f"run.steps={args.steps}", "eval.every=5", *KINDS[kind]]
    if not (run_dir / "summary.json").exists():
        subprocess.run(
            [sys.executable, HERE.parent / "launch/train.py", *SETTINGS, *given, *more], check=True
        )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
