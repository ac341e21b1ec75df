"""Runs this trainer and another one alternately, each in its own process or processes.

The other trainer is TRL's PPOTrainer (trl_step.py) or a plain PyTorch loop (plain_loop.py).

Ratios are computed for each pair of runs, so that drifts in the speed of the machine cancel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import (
    LEARNING_RATE,
    folder_of,
    minibatch_of,
    parser,
    stops_early,
    trl_problem,
    workload_of,
)
from ppo_ds.distributed.threads import own_cores, share, user_limit

HERE = Path(__file__).resolve().parent
# options that are not passed on to the runs of ppo_step.py; each takes a value
OWN = ("--against", "--ranks", "--trl-python", "--trl-micro-rows", "--pairs", "--threads", "--json")
NAMES = {"trl": "TRL", "plain": "plain"}


def compare(args: argparse.Namespace, argv: list[str]) -> int:
    if args.trl_python and (problem := trl_problem(args.trl_python)):
        parser().error(problem)
    args.ranks = args.ranks or 1
    if not args.threads:  # both trainers get the same number of threads
        cores = [own_cores()] * args.ranks
        args.threads = share(0, cores, requested=None, limit=user_limit(os.environ)).each
    other = NAMES[args.against]
    pairs: list[dict[str, Any]] = []
    print(
        f"{'pair':<6}{'ours, s':>10}{other + ', s':>10}{'samples/s':>11}{'CPU s':>8}{'memory':>8}   "
        "mean response tokens   (columns 4 to 6: ratios)",
        flush=True,
    )
    for i in range(args.pairs):
        pairs.append(_pair(_ours(args, argv, i), _theirs(args, i)))
        print(f"{i + 1:<6}{_row(pairs[-1])}", flush=True)
    summary = {
        name: _spread([pair[name] for pair in pairs]) for name in ("samples_per_s", "cpu_seconds", "memory")
    }
    print(f"\nsamples/s, ours over {other}: {_format_spread(summary['samples_per_s'])}")
    print(f"CPU seconds of a step, {other} over ours: {_format_spread(summary['cpu_seconds'])}")
    print(f"peak memory, ours over {other}: {_format_spread(summary['memory'])}")
    if args.json:
        args.json.write_text(
            json.dumps({"workload": args.workload, "pairs": pairs, "summary": summary}, indent=2) + "\n",
            encoding="utf-8",
        )
    return 0


def without(argv: list[str], names: tuple[str, ...]) -> list[str]:
    """Returns ``argv`` without the options ``names`` and their values, written ``--a b`` or ``--a=b``."""
    kept, skip = [], False
    for word in argv:
        if not skip and word.split("=", 1)[0] not in names:
            kept.append(word)
        skip = not skip and word in names
    return kept


def own_arguments(args: argparse.Namespace, argv: list[str], result: Path) -> list[str]:
    """Returns the arguments of ppo_step.py for one run."""
    return [*without(argv, OWN), "--threads", str(args.threads), "--no-limits", "--json", str(result)]


def their_arguments(args: argparse.Namespace, result: Path) -> list[str]:
    """Returns the arguments of trl_step.py or plain_loop.py for the same work."""
    work = workload_of(args)
    values = {
        "folder": folder_of(args),
        "steps": args.steps,
        "prompts": work.prompts,
        "new-tokens": work.new_tokens,
        "max-prompt-tokens": work.prompt_tokens[1],
        "epochs": args.passes,
        "minibatches": args.minibatches,
        "micro-rows": args.trl_micro_rows or minibatch_of(args),
        "rollout-rows": work.prompts,
        "threads": args.threads * (args.ranks or 1),
        "dtype": work.dtype,
        "lr": LEARNING_RATE,
        "json": result,
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return words + (["--stop"] if stops_early(args) else [])


def _ours(args: argparse.Namespace, argv: list[str], i: int) -> dict[str, Any]:
    result = _result_file(args, f"{i}_ours.json")
    start = [sys.executable]
    if args.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    found = _run(
        [*start, str(HERE / "ppo_step.py"), *own_arguments(args, argv, result)], args.threads, result
    )
    memory = found["metrics"].get("mem/alloc_peak_gb", found["metrics"]["mem/host_rss_gb"])
    return {
        "step_seconds": [step["time/step"] for step in found["seconds_per_step"]],
        "cpu_seconds": found["cpu_seconds_of_all_ranks"],
        "samples_per_step": found["samples_per_step"],
        "response_tokens_mean": found["response_tokens_mean"],
        "memory_gb": memory * args.ranks,  # that of the largest rank, times the ranks
        "seconds": found["seconds"],
    }


def _theirs(args: argparse.Namespace, i: int) -> dict[str, Any]:
    result = _result_file(args, f"{i}_{args.against}.json")
    script = {
        "trl": [args.trl_python, str(HERE / "trl_step.py")],
        "plain": [sys.executable, str(HERE / "plain_loop.py")],
    }[args.against]
    found = _run([*script, *their_arguments(args, result)], args.threads * args.ranks, result)
    lengths = found["response_tokens_mean"]
    return {
        **found,
        "response_tokens_mean": sum(lengths) / len(lengths),
        "memory_gb": found.get("alloc_peak_gb", found["host_rss_gb"]),
    }


def _result_file(args: argparse.Namespace, name: str) -> Path:
    folder = folder_of(args) / "against"
    folder.mkdir(exist_ok=True)
    return folder / name


def _run(command: list[str], threads: int, result: Path) -> dict[str, Any]:
    """Runs the command, logs its output beside ``result``, and returns the JSON in ``result``."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    log = result.with_suffix(".log")
    result.unlink(missing_ok=True)
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        script = next(Path(word).name for word in command if word.endswith(".py"))
        raise SystemExit(f"error: {script} ended with exit code {code}; its output is in {log}")
    return json.loads(result.read_text(encoding="utf-8"))


def _pair(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Computes the ratios. This trainer is better if they are above 1, and for memory if it is below 1."""
    assert ours["samples_per_step"] == theirs["samples_per_step"]
    return {
        "samples_per_s": sum(theirs["step_seconds"]) / sum(ours["step_seconds"]),
        "cpu_seconds": sum(theirs["cpu_seconds"]) / sum(ours["cpu_seconds"]),
        "memory": ours["memory_gb"] / theirs["memory_gb"],
        "ours": ours,
        "theirs": theirs,
    }


def _row(pair: dict[str, Any]) -> str:
    ours, theirs = pair["ours"], pair["theirs"]
    means = [sum(each["step_seconds"]) / len(each["step_seconds"]) for each in (ours, theirs)]
    ratios = f"{pair['samples_per_s']:>11.2f}{pair['cpu_seconds']:>8.2f}{pair['memory']:>8.2f}"
    lengths = f"{ours['response_tokens_mean']:.1f} and {theirs['response_tokens_mean']:.1f}"
    return f"{means[0]:>10.2f}{means[1]:>10.2f}{ratios}   {lengths}"


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def _format_spread(spread: dict[str, float]) -> str:
    return f"median {spread['median']:.2f}, from {spread['min']:.2f} to {spread['max']:.2f}"
