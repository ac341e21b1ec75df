"""Runs the ranks of test_fault_worlds.py: the same runs on two ranks, then on one, then on two again.

Each of the three parts is a separate function. The run directories are ``ROOT/{two,one,back}/<case>``.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_ds.assemble.run import build_run
from ppo_ds.config.validation import validated
from ppo_ds.engine.checkpoint import shards
from ppo_ds.run import final_report
from ppo_ds.run.loop import Run
from tests.invariant import invariant_assets

HANG = 240  # seconds after which a hanging case prints its stacks and exits
SAVED = 2  # the step whose checkpoint is loaded with another number of ranks
Tree = dict[str, Any]

ADAPTED = {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}

CASES: dict[str, Tree] = {  # ZeRO 2 and 3, fp32 and bf16, tied and untied weights, an average, adapters
    "zero2": {"stage": 2, "dtype": "bf16", "model": "tied", "actor": {"ema": {"decay": 0.9}}},
    "zero3": {"stage": 3},
    "lora": {"stage": 3, "dtype": "bf16", "actor": {**ADAPTED, "ema": {"decay": 0.9}}, "critic": ADAPTED},
}
UNEVEN = "uneven layers"  # on ZeRO-3


def of_this_test(part: Callable[[Path], None]) -> Callable[[], None]:
    """Returns a function that runs ``part`` on one rank in the folder given by sys.argv."""

    def run_part() -> None:
        shards.SHARD_BYTES = 30_000  # several shards, so that both ranks write
        final_report.plot_curves = lambda *_, **__: False  # a plot takes a second, and no test reads it
        part(Path(sys.argv[1]))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

    return run_part


@of_this_test
def train(root: Path) -> None:
    """Trains four steps with a checkpoint after each, and an export after step SAVED and the last."""
    for name, what in CASES.items():
        tree = config(root, **what)
        tree["checkpoint"]["export_every"] = SAVED
        run(name, root / "two" / name, tree)


@of_this_test
def train_unevenly(root: Path) -> None:
    """Trains while checking that all ranks call each collective with the same shapes.

    Without the check, gloo accepts different shapes and returns wrong numbers.
    """
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    zero = {"generation_gather": "layers"}
    run(UNEVEN, root / "two" / UNEVEN, uneven(config(root, stage=3, actor={"zero": zero})))


@of_this_test
def take_over(root: Path) -> None:
    """Loads on one rank what two have saved, saves it, and trains on."""
    for name, what in CASES.items():
        run(name, root / "one" / name, config(root, **what, resume=root / "two" / name), save_again)
    run(UNEVEN, root / "one" / UNEVEN, uneven(config(root, stage=0)))


@of_this_test
def take_back(root: Path) -> None:
    for name, what in CASES.items():
        run(name, root / "back" / name, config(root, **what, resume=root / "one" / name), save_again)


def checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{SAVED:06d}"


def save_again(built: Run) -> None:
    assert built.state.step == SAVED
    built.saver.save_if_due(None, 0.0, last=True, again=True)


def run(name: str, run_dir: Path, tree: Tree, before: Callable[[Run], None] | None = None) -> None:
    faulthandler.dump_traceback_later(HANG, exit=True)
    size = int(os.environ["WORLD_SIZE"])
    print("==", name, "on", size, flush=True)
    tree["run"]["dir"] = str(run_dir)
    built = build_run(validated(tree, size))
    if before is not None:
        before(built)
    assert built.fit() == "done"
    for model in built.stage.models.values():
        model.engine.destroy()
    del built, model
    gc.collect()
    faulthandler.cancel_dump_traceback_later()


def config(
    root: Path,
    *,
    stage: int,
    dtype: str = "fp32",
    model: str = "actor",
    actor: Tree | None = None,
    critic: Tree | None = None,
    resume: Any = None,
) -> Tree:
    """Returns the config of four PPO steps of one optimizer step each; parts of the loop have states too.

    Decoding is greedy, because a change of the number of ranks changes the random draws. Old log-probs come
    from training, so that faults and other batches of the decode backend do not reach the update.
    """
    zero = {"zero": {"stage": stage}, "optim": {"lr": 1e-3, "warmup_ratio": 0.25}}
    raw = (
        {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}} if stage == 3 else {}
    )
    own = actor or {}
    return {
        "run": {
            "steps": 4,
            "seed": 1,
            "timeout_minutes": 2,
            "resume": str(checkpoint(resume)) if resume else "never",
        },
        "actor": {
            **zero,
            **raw,
            **own,
            "zero": zero["zero"] | own.get("zero", {}),
            "model": {"path": str(root / model), "dtype": dtype},
        },
        "critic": {**zero, **raw, **(critic or {}), "init": "path", "model": {"path": str(root / "scorer")}},
        "reference": {"zero": {"stage": 3 if stage == 3 else 0}},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "sampling": {"max_new_tokens": 10, "top_k": 1, "stop_token_ids": invariant_assets.STOPS},
        "data": {"path": str(root / "prompts.jsonl")},
        "algo": {
            "epochs": 1,
            "old_logprobs": "recompute",
            "kl": {"coef": 0.1, "controller": "adaptive"},
            "reward_shaping": {"normalize": "running"},
        },
        "memory": {"rollout_tokens": 200, "score_tokens": 150, "train_tokens": 100},
        "checkpoint": {"every": 1, "keep_last": 9},
        "reward": {
            "_target_": "ppo_ds.rewards.function.FunctionReward",
            "path": f"{invariant_assets.__file__}:score",
        },
    }


def uneven(tree: Tree) -> Tree:
    """Changes the config to two steps of two optimizer steps with answers of very different lengths.

    Answers on the first rank have ten tokens, and answers on the second rank have one.
    """
    tree["run"]["steps"] = tree["algo"]["epochs"] = 2
    tree["data"] |= {"path": str(Path(tree["data"]["path"]).with_name("uneven.jsonl")), "shuffle": False}
    tree["sampling"]["stop_token_ids"] = []
    return tree
