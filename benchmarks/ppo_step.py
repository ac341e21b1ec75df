"""Measures the time of a PPO step by phase, and the fractions of the machine's limits that it reaches.

See docs/dev/performance.md.

    python benchmarks/ppo_step.py W1 --threads 1
    deepspeed --num_gpus 2 benchmarks/ppo_step.py W2 --set rollout.backend=hf --json w2.json
    python benchmarks/ppo_step.py W2 --against trl --trl-python TRL_ENV/bin/python --threads 1

It runs the trainer like launch/train.py: it composes a config and calls the same build_run and fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

from benchmarks.options import folder_of, overrides, parsed, workload_of
from benchmarks.workloads import is_prepared, prepare


def main(argv: list[str]) -> int:
    args = parsed(argv)
    if args.prepare_only:
        prepare(workload_of(args), folder_of(args), args.model)
        return 0
    if os.environ.get("RANK", "0") == "0":
        prepare_apart(args, argv)
    while not is_prepared(workload_of(args), folder_of(args), args.model):  # the other ranks wait for rank 0
        time.sleep(0.5)
    if args.against:
        from benchmarks.against import compare

        return compare(args, argv)
    return measure(args)


def prepare_apart(args: argparse.Namespace, argv: list[str]) -> None:
    """Prepares models and prompts in a subprocess, so that this process's peak memory excludes them."""
    if not is_prepared(workload_of(args), folder_of(args), args.model):
        alone = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        if subprocess.run([sys.executable, __file__, *argv, "--prepare-only"], env=alone).returncode:
            raise SystemExit(
                f"error: models and prompts could not be written to {folder_of(args)}; see the error above"
            )


def measure(args: argparse.Namespace) -> int:
    """Runs the trainer in this process and prints the figures on rank 0."""
    from launch.cli import load_config
    from launch.process import complain, exit_now, prepare_environment
    from ppo_ds.errors import RunError, UserError

    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    try:
        config = load_config(overrides(args))
        prepare_environment(config.run.verbose, trains=True, fixed_segments=config.rollout.own_weights)
        found, is_main = run(config, args)
    except UserError as error:
        exit_now(complain(error))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        exit_now(1)
    if is_main:
        from benchmarks.report import table

        print(table(found), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    exit_now(0)


def run(config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Trains, and returns the figures of all steps but the first, and whether this is rank 0."""
    from benchmarks.counting import Recorder, sizes
    from benchmarks.report import figures, limit_fractions
    from ppo_ds.assemble.run import build_run
    from ppo_ds.run import loop as training_run

    with redirect_stdout(sys.stderr):
        run = build_run(config)
        # a benchmark needs neither the trained weights nor a report
        run.stage.export = lambda run_dir: None
        training_run.write_report = lambda *_, **__: None
        recorder = Recorder(run.stage)
        if args.cpu_seconds:
            run.stage.context.timer._mark = time.process_time
        run.fit()
    recorder.cpu.append(time.process_time())
    cpu = [b - a for a, b in zip(recorder.cpu[1:], recorder.cpu[2:], strict=False)]
    cpu_of_ranks = run.world.gather_objects(cpu)
    run.world.barrier()  # all ranks measure the limits at the same time, because they also train together
    limits = None if args.no_limits else _limits(run.stage)
    run.world.barrier()
    if not run.world.is_main:
        return {}, False
    records = [
        json.loads(line)
        for line in (Path(config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ][1:]
    steps = recorder.steps[1:]
    if len(steps) < args.steps:
        raise SystemExit(f"error: the run ended after {len(recorder.steps)} of {args.steps + 1} steps")
    found = {
        "workload": args.workload,
        "machine": _machine(run.world.device),
        "ranks": run.world.size,
        "overrides": overrides(args),
        "cpu_seconds_of_all_ranks": [sum(ranks) for ranks in zip(*cpu_of_ranks, strict=True)],
    } | figures(records, steps, cpu)
    if limits is not None:
        epochs = [record["policy/epochs_run"] for record in records]
        found |= limit_fractions(found, steps, sizes(run.stage), epochs, limits, run.world.size)
    return found, True


def _limits(stage: Any) -> Any:
    from benchmarks.report import Limits
    from ppo_ds.engine.peak import bytes_per_s, gemm_flops_per_s

    lm, device = stage.actor.module.lm, stage.context.world.device
    hidden = lm.config.hidden_size
    inner = getattr(lm.config, "intermediate_size", 4 * hidden)
    rows = min(stage.learn.token_budget, 2048)
    return Limits(
        gemm_flops_per_s(
            device, lm.dtype, [(rows, hidden, inner), (rows, inner, hidden), (rows, hidden, hidden)]
        ),
        bytes_per_s(device),
    )


def _machine(device: Any) -> dict[str, Any]:
    import deepspeed
    import torch
    import transformers

    from benchmarks.report import machine

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepspeed": deepspeed.__version__,
    }
    return machine(name, torch.get_num_threads(), versions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
