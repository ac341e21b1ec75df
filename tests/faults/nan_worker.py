"""Runs the ranks of test_fault_nan.py: one of two ranks gets a NaN in one optimizer step.

The cases train an actor and a critic, or single engines. Under ROOT each case writes its final models as in a
checkpoint: ``faulted``, where a NaN was injected, and ``left_out``, where instead the learner never saw that
minibatch. With ZeRO-0 in fp32 there is also ``unguarded``, where a NaN was injected with the check disabled.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ppo_ds.assemble.run import build_run
from ppo_ds.config.validation import validated
from ppo_ds.distributed.world import World, connect
from ppo_ds.engine.checkpoint import shards
from ppo_ds.engine.checkpoint.files import on_all_ranks, write_json
from ppo_ds.engine.checkpoint.state import consolidated, save_model, save_weight_copy
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ppo import learner
from ppo_ds.ppo.trainer import PPOTrainer
from tests.engine.checkpoint_worker import NOT_PERSISTENT, allow_fp16_on_cpu, make
from tests.faults.injection import injected, step_unguarded
from tests.faults.worlds_worker import HANG, config

BAD = 2  # index of the optimizer step with the NaN, of eight steps
# ZeRO stage, dtype, place of the NaN; ZeRO-0 in 16 bits runs as stage 1
CASES: dict[str, tuple[int, str, str]] = {
    "zero0": (0, "fp32", "loss.actor"),
    "zero1": (1, "fp32", "loss.critic"),
    "zero2": (2, "bf16", "grad.critic"),
    "zero3": (3, "bf16", "grad.actor"),
}
OFFLOADED = "zero2"
# stage, dtype, optimizer offloaded; these are not possible in a trainer on a CPU
ENGINES: dict[str, tuple[int, str, bool]] = {
    "1 bf16 offloaded": (1, "bf16", True),
    "1 fp16": (1, "fp16", False),
    "3 fp16 offloaded": (3, "fp16", True),
}


def main() -> None:
    shards.SHARD_BYTES = 10**9
    root = Path(sys.argv[1])
    for name, case in CASES.items():
        faulthandler.dump_traceback_later(HANG, exit=True)
        updates(root, name, *case)
    faulthandler.dump_traceback_later(HANG, exit=True)
    engines(root)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# -- actor and critic ------------------------------------------------------------------------------


def updates(root: Path, name: str, stage: int, dtype: str, place: str) -> None:
    tree = config(root, stage=stage, dtype=dtype, actor={"ema": {"decay": 0.9}})
    tree["run"]["dir"] = str(root / name / "run")
    tree["algo"] |= {"epochs": 2, "minibatch_size": 4}
    tree["memory"]["train_tokens"] = 10_000  # one micro-batch in each optimizer step
    for role in ("actor", "critic"):
        tree[role]["zero"] |= {"offload_optimizer": name == OFFLOADED}
    run = build_run(validated(tree, 2))
    trainer = run.stage
    experience, _ = trainer.make_experience(*trainer.collect()[:2], 0.1)
    start = run.saver.checkpoints.save(
        1, trainer.models, run.saver.state_dict(), copies=trainer.weight_copies
    )
    for variant in ("faulted", "left_out") + (("unguarded",) if name == "zero0" else ()):
        run.saver.resume(start)
        with ExitStack() as patches:
            if variant == "left_out":
                patches.enter_context(patch.object(learner, "minibatches", all_but(BAD)))
            else:
                patches.enter_context(patch.object(*injected(f"{place}:rank=1:at={BAD + 1}")))
            if variant == "unguarded":
                patches.enter_context(patch.object(learner, "step_or_skip", step_unguarded))
            said = [trainer.learn(experience, 0.1, seed=seed)[1] for seed in (5, 6)]
        keep(root / name / variant, trainer, said)
    trainer.actor.engine.destroy()
    trainer.learn.critic.engine.destroy()


def keep(folder: Path, trainer: PPOTrainer, said: list[dict[str, float]]) -> None:
    world = trainer.context.world
    for role, model in trainer.models.items():
        save_model(model, folder / role)
    save_weight_copy(trainer.weight_copies["ema"], folder / "ema")
    everyone = world.gather_objects(said)
    on_all_ranks(world, lambda: write_json(folder / "said.json", everyone) if world.is_main else None)


def all_but(left_out: int) -> Callable[..., Iterator[torch.Tensor]]:
    """Returns a generator function that yields the minibatches of learn() except the one with this number."""
    numbers, minibatches = itertools.count(), learner.minibatches

    def others(n_rows: int, minibatch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
        for rows in minibatches(n_rows, minibatch_size, generator):
            if next(numbers) != left_out:
                yield rows

    return others


# -- single engines -------------------------------------------------------------------------------


def engines(root: Path) -> None:
    world, found = connect(5), {}
    allow_fp16_on_cpu()
    for name, (stage, dtype, offload) in ENGINES.items():
        raw: dict[str, Any] = {"zero_optimization": NOT_PERSISTENT if stage == 3 else {}}
        if dtype == "fp16":
            raw["fp16"] = {"initial_scale_power": 6, "hysteresis": 1}
        ways = {way: engine(world, stage, dtype, offload, raw, way) for way in ("left out", "nan", "dropped")}
        found[name] = {
            way: {"same": same(ways["left out"][0], weights), "said": said}
            for way, (weights, said) in ways.items()
        }
    if world.is_main:
        (root / "engines.json").write_text(json.dumps(found))


def engine(
    world: World, stage: int, dtype: str, offload: bool, raw: dict[str, Any], way: str
) -> tuple[Any, Any]:
    """Takes six optimizer steps and returns the weights and the reports.

    Depending on ``way``, the third step is left out, has a NaN on the last rank, or is finite and skipped.
    """
    model, said = make(world, stage, dtype, raw=raw, offload=offload, dropout=0.0), []
    for step in range(6):
        if step == BAD and way == "left out":
            continue
        accumulate(model, step, nan=step == BAD and way == "nan")
        finite = math.isfinite(world.sum(model.local_squared_grad_norm().float()))
        info = (
            model.skip(overflow=not finite)
            if not finite or (step == BAD and way == "dropped")
            else model.step()
        )
        said.append([info.skipped, info.loss_scale, model.steps])
    weights = consolidated(model)
    model.engine.destroy()
    return weights and {
        key: value for key, value in weights.items() if key != "seen"
    }, said  # the buffer ``seen`` counts forwards


def accumulate(model: TrainedModel, step: int, nan: bool) -> None:
    ids = torch.randint(0, 13, (8, 5), generator=torch.Generator().manual_seed(100 + step))
    halves = ids.chunk(model.world.size)[model.world.rank].chunk(2)
    for i, rows in enumerate(halves):
        logits = model(rows).float()
        loss = (
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
            / 32
            * model.world.size
        )
        bad = nan and i == 0 and model.world.rank == model.world.size - 1
        model.backward(loss * math.nan if bad else loss, last=i == len(halves) - 1)


def same(a: dict[str, torch.Tensor] | None, b: dict[str, torch.Tensor] | None) -> bool:
    return a is None or (a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a))
