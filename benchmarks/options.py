"""The command line of the benchmark, and the trainer's config that it selects.

It imports only the standard library, so that a process that starts many runs stays small.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.workloads import MINIBATCHES, PASSES, WORKLOADS, Workload, dry

PAIRS = 5
LEARNING_RATE = 1e-8  # too small to change the response lengths of a prepared model


def count(text: str) -> int:
    """Parses a positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="benchmarks/ppo_step.py",
        description="Measures the time of a PPO step by phase. See docs/dev/performance.md.",
        allow_abbrev=False,
    )
    p.add_argument("workload", choices=sorted(WORKLOADS))
    p.add_argument(
        "--steps", type=count, default=3, help="measured steps, after one that is not measured (default 3)"
    )
    p.add_argument("--dtype", choices=("fp32", "bf16"), help="dtype of all models; default: the workload's")
    p.add_argument(
        "--threads", type=count, help="threads of each rank on a CPU; default: its share of the cores"
    )
    p.add_argument("--prompts", type=count, help="prompts of one PPO step; default: the workload's")
    p.add_argument(
        "--passes", type=count, default=PASSES, help=f"passes over each rollout (default {PASSES})"
    )
    p.add_argument(
        "--minibatches",
        type=count,
        default=MINIBATCHES,
        help=f"optimizer steps of each pass; they must divide the prompts (default {MINIBATCHES})",
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of the config, e.g. rollout.backend=hf",
    )
    p.add_argument("--model", help="a model folder or Hub id instead of random weights")
    p.add_argument("--dry", action="store_true", help="tiny sizes, to test that it runs")
    p.add_argument(
        "--folder",
        type=Path,
        help="folder of models, prompts and the run; default: outputs/benchmarks/<workload>",
    )
    p.add_argument("--json", type=Path, help="also write the figures to this file")
    p.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="measure the CPU seconds of each phase instead of its seconds; needs --threads 1",
    )
    p.add_argument("--no-limits", action="store_true", help="do not measure the limits of the machine")
    p.add_argument("--prepare-only", action="store_true", help="write models and prompts, and exit")
    p.add_argument(
        "--against",
        choices=("trl", "plain"),
        help="run TRL's trainer, or a plain PyTorch loop, alternately with this one, and compare",
    )
    p.add_argument(
        "--ranks",
        type=count,
        help="ranks of this trainer with --against plain; the plain loop gets the threads of all of them "
        "(default 1)",
    )
    p.add_argument("--trl-python", help="the Python of an environment with trl==1.10.0")
    p.add_argument(
        "--trl-micro-rows", type=count, help="rows of TRL's forward and backward; default: the minibatch"
    )
    p.add_argument("--pairs", type=count, help=f"pairs of runs with --against (default {PAIRS})")
    p.add_argument("--local_rank", help=argparse.SUPPRESS)  # passed by the deepspeed launcher
    return p


def trl_problem(python: str) -> str | None:
    """Returns why ``python`` cannot run TRL, or None if it can import trl."""
    try:
        done = subprocess.run([python, "-c", "import trl"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"--trl-python {python}: cannot be started ({error.strerror}); give a Python that has trl"
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return f"--trl-python {python}: cannot import trl ({reason}); install trl==1.10.0 there"
    return None


def parsed(argv: list[str]) -> argparse.Namespace:
    args = parser().parse_args(argv)
    if problem := _problem(args):
        parser().error(problem)
    args.pairs = args.pairs or PAIRS
    return args


def _problem(args: argparse.Namespace) -> str | None:
    if (prompts := workload_of(args).prompts) % args.minibatches:
        return (
            f"--minibatches {args.minibatches}: does not divide the {prompts} prompts; choose a divisor, or "
            "another --prompts"
        )
    if args.cpu_seconds and args.threads != 1:
        return "--cpu-seconds needs --threads 1, since the CPU seconds of all threads are added"
    needs = {
        "pairs": ("trl", "plain"),
        "trl_python": ("trl",),
        "trl_micro_rows": ("trl",),
        "ranks": ("plain",),
    }
    for name, others in needs.items():
        if getattr(args, name) is not None and args.against not in others:
            return f"--{name.replace('_', '-')} needs --against {' or '.join(others)}; add that, or remove it"
    if not args.against:
        return None
    if args.against == "trl" and not args.trl_python:
        return (
            "--against trl needs --trl-python, the Python of an environment with trl==1.10.0 "
            "(docs/dev/performance.md)"
        )
    if args.cpu_seconds:
        return "--cpu-seconds cannot be used with --against, which reports CPU seconds too; remove it"
    if args.trl_micro_rows and minibatch_of(args) % args.trl_micro_rows:
        return (
            f"--trl-micro-rows {args.trl_micro_rows}: does not divide the {minibatch_of(args)} responses of "
            "a minibatch; choose a divisor"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return (
            f"--against starts its runs itself, but there are {os.environ['WORLD_SIZE']} ranks; start it "
            "with python, without a launcher"
        )
    if any(key.startswith("run.threads=") for key in args.set):
        return (
            "--set run.threads does not reach the other trainer; with --against set the threads of both by "
            "--threads"
        )
    return None


def workload_of(args: argparse.Namespace) -> Workload:
    chosen = WORKLOADS[args.workload]
    chosen = dry(chosen) if args.dry else chosen
    return replace(chosen, dtype=args.dtype or chosen.dtype, prompts=args.prompts or chosen.prompts)


def minibatch_of(args: argparse.Namespace) -> int:
    """Returns the number of responses of an optimizer step."""
    return workload_of(args).prompts // args.minibatches


def stops_early(args: argparse.Namespace) -> bool:
    """Returns whether a stop token ends responses: with random response lengths, or with --model."""
    return bool(args.model) or workload_of(args).mean_tokens is not None


def folder_of(args: argparse.Namespace) -> Path:
    return args.folder or Path("outputs/benchmarks") / (args.workload + ("_dry" if args.dry else ""))


def overrides(args: argparse.Namespace) -> list[str]:
    """Returns the overrides of the run, as on the command line of launch/train.py."""
    work, folder = workload_of(args), folder_of(args).resolve()
    keys = {
        "run.name": args.workload,
        "run.dir": folder / "run",
        "run.steps": args.steps + 1,
        "actor.model.path": folder / "model",
        "actor.model.dtype": work.dtype,
        "actor.optim.lr": LEARNING_RATE,
        "actor.optim.schedule": "constant",
        "critic.init": "reward",
        "critic.optim.lr": LEARNING_RATE,
        "critic.optim.schedule": "constant",
        "zero": "stage0",
        "reward": "model",
        "reward.model.path": folder / "reward",
        "reward.model.dtype": work.dtype,
        "reward.audit": "off",
        "data.path": folder / "prompts.jsonl",
        "data.apply_chat_template": "false",
        "data.max_prompt_tokens": work.prompt_tokens[1],
        "rollout.prompts_per_step": work.prompts,
        "sampling.max_new_tokens": work.new_tokens,
        "algo.epochs": args.passes,
        "algo.minibatch_size": minibatch_of(args),
        "checkpoint.every": 0,
        "eval.train_prompts": 0,
        "tracker.samples": 0,
    }
    if not stops_early(args):
        keys["sampling.stop_token_ids"] = "[]"
    if args.threads:
        keys["run.threads"] = args.threads
    return [f"{key}={value}" for key, value in keys.items()] + args.set
