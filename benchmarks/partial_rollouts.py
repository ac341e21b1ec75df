"""Compares CPU seconds of generation with and without ``rollout.partial``, with geometric lengths.

    python benchmarks/partial_rollouts.py W2 --pairs 12

In each pair, a few steps of each kind follow one another in one process, with the same prompts and the same
model (random weights, which do not change). Ratios are computed for each pair, so that drifts in the speed of
the machine cancel. The first steps of partial rollouts, which begin without responses in progress, do not
count.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

import torch
from transformers import AutoModelForCausalLM

from benchmarks.workloads import WORKLOADS, dry, prepare
from ppo_ds.background.pending import Pending
from ppo_ds.config.sections.data import PPODataConfig
from ppo_ds.data.prompts import PromptSource, PromptStream
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.ppo.collector import RolloutCollector
from ppo_ds.ppo.partial_rollouts import PartialRolloutCollector
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.keys import RolloutConfig
from ppo_ds.rollout.static import StaticGenerator

WARM_UP = 4  # steps


def main(argv: list[str]) -> None:
    args = parsed(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    workload = dry(WORKLOADS[args.workload]) if args.dry else WORKLOADS[args.workload]
    folder = Path(args.folder or f"outputs/benchmarks/{args.workload}{'_dry' if args.dry else ''}")
    prepare(workload, folder)
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    forwards: list[None] = []
    lm.register_forward_pre_hook(lambda *_: forwards.append(None))
    tokenizer = load_tokenizer(str(folder / "model"))
    data = PPODataConfig(max_prompt_tokens=workload.prompt_tokens[1], apply_chat_template=False)
    prompts = args.prompts or workload.prompts
    source = PromptSource(
        str(folder / "prompts.jsonl"), data=data, tokenizer=tokenizer, max_new_tokens=workload.new_tokens
    )
    world = SimpleNamespace(rank=0, size=1, sum=lambda numbers: numbers)
    sampling = SamplingParams(workload.new_tokens, 0, 1.0, 1.0, 0, tokenizer.stop_ids, ())
    budget = int(args.oversample * prompts + 1) * (workload.prompt_tokens[1] + workload.new_tokens)

    def collector(kind: type[RolloutCollector], **more: object) -> RolloutCollector:
        return kind(
            prompts=PromptStream(source, prompts_per_step=prompts),
            actor=SimpleNamespace(generation_mode=nullcontext, steps=0),
            generator=StaticGenerator(lambda: lm, tokenizer=tokenizer, token_budget=budget),
            start_scoring=lambda rollout: Pending.of(None),
            sampling=sampling,
            timer=lambda phase: nullcontext(),
            check=lambda: None,
            **more,
        )

    section = RolloutConfig.read(
        {
            **{"backend": "static", "prompts_per_step": prompts, "environment": {}},
            **{"partial": True, "oversample": args.oversample, "max_versions": args.max_versions},
        }
    )
    partial = collector(PartialRolloutCollector, section=section, tokenizer=tokenizer, world=world)
    kinds, pairs = (collector(RolloutCollector), partial), list[list[float]]()
    measured(partial, WARM_UP)
    print(f"{'':6}{'CPU seconds per step':>28}{'':8}{'forwards per step':>22}")
    print(f"{'pair':6}{'whole':>14}{'partial':>14}{'ratio':>8}{'whole':>11}{'partial':>11}{'stale':>8}")
    for number in range(1, args.pairs + 1):
        counts, pair = list[float](), list[float]()
        for kind in kinds:
            forwards.clear()
            spent, stale = measured(kind, args.steps)
            pair.append(spent)
            counts.append(len(forwards) / args.steps)
        pairs.append(pair)
        seconds = f"{pair[0]:>14.2f}{pair[1]:>14.2f}{pair[0] / pair[1]:>8.2f}"
        numbers = f"{seconds}{counts[0]:>11.0f}{counts[1]:>11.0f}"
        print(f"{number:<6}{numbers}{stale:>8.0%}", flush=True)
    ratios = [whole / partial for whole, partial in pairs]
    print(f"\nratio of the pairs: median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


def parsed(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="benchmarks/partial_rollouts.py", allow_abbrev=False)
    p.add_argument("workload", choices=[name for name, one in WORKLOADS.items() if one.mean_tokens])
    p.add_argument("--prompts", type=int, help="prompts per step; default: those of the workload")
    p.add_argument("--pairs", type=int, default=12, help="measured pairs; default 12")
    p.add_argument("--steps", type=int, default=4, help="steps of each kind in a pair; default 4")
    p.add_argument("--oversample", type=float, default=2.0, help="rollout.oversample; default 2")
    p.add_argument("--max-versions", type=int, default=8, help="rollout.max_versions; default 8")
    p.add_argument("--threads", type=int, default=1, help="threads; default 1")
    p.add_argument("--folder", help="model and prompts; default outputs/benchmarks/WORKLOAD")
    p.add_argument("--dry", action="store_true", help="tiny sizes: tests that it runs")
    return p.parse_args(argv)


def measured(collect: RolloutCollector, steps: int) -> tuple[float, float]:
    """Returns the CPU seconds of a step, and the share of the tokens that an earlier step sampled."""
    seconds, stale, tokens = 0.0, 0, 0
    for _ in range(steps):
        start = time.process_time()
        rollout = collect()[0]
        seconds += time.process_time() - start
        collect.actor.steps += 1
        tokens += int(rollout.response_lengths.sum())
        stale += 0 if rollout.staleness is None else int((rollout.staleness > 0).sum())
    return seconds / steps, stale / tokens


if __name__ == "__main__":
    main(sys.argv[1:])
