"""Trains models with tensors of few elements, and sums gradients in 16 and 32 bits.

Rank 0 writes the results to ``FOLDER/small.json`` and ``FOLDER/sums.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ppo_ds.distributed.world import World, connect
from ppo_ds.engine.checkpoint.state import consolidated, load_model, save_model
from ppo_ds.engine.gradients import local_gradients
from ppo_ds.engine.trained import LRSchedule, TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.engine.zero import deepspeed_config
from tests.support.collectives import Call, read_calls, record_collectives

SIZES = (1, 2, 3, 7, 8, 9)  # on eight ranks
STEPS, LR, DECAY = 5, 0.1, 0.5
NOT_PERSISTENT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Vectors(nn.Module):
    """Has one parameter for each of ``sizes``; the gradient of its output is the input."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32):
        super().__init__()
        for i, size in enumerate(sizes):
            start = torch.arange(1.0, size + 1) / 4 + i
            self.register_parameter(f"v{i}", nn.Parameter(start.to(dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.parameters())) * x).sum()


def inputs(step: int) -> Tensor:
    """Returns the inputs of the eight ranks: [8, sum of SIZES]."""
    return torch.randn(8, sum(SIZES), generator=torch.Generator().manual_seed(step))


def engine(world: World, module: nn.Module, stage: int, dtype: str, ranks: int) -> TrainedModel:
    """Makes an engine whose config is that of a run with ``ranks`` ranks."""
    raw = NOT_PERSISTENT if stage == 3 else {}
    return TrainedModel(
        module,
        world=world,
        deepspeed_config=deepspeed_config(stage=stage, dtype=dtype, ranks=ranks, raw=raw),
        schedule=LRSchedule(LR, "constant", 0.0, 1.0, STEPS),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=DECAY,
    )


def train(model: TrainedModel, steps: range) -> list[float]:
    """Trains on the row of this rank and returns the gradient norms."""
    norms = []
    for step in steps:
        model.backward(model(inputs(step)[model.world.rank]), last=True)
        norms.append(model.step().grad_norm)
    return norms


def small() -> None:
    world, folder, results = connect(5.0), Path(sys.argv[1]), {}
    synchronize = MagicMock()
    get_accelerator().synchronize = synchronize
    for stage in range(4):
        model = engine(world, Vectors(SIZES), stage, "fp32", world.size)
        copy = WeightCopy(model)
        synchronize.reset_mock()
        norms = train(model, range(STEPS - 1))
        waits = synchronize.call_count
        copy.ema_update(0.25)
        directory = folder / f"stage{stage}"
        if world.is_main:
            directory.mkdir()
        world.barrier()
        save_model(model, directory)
        norms += train(model, range(STEPS - 1, STEPS))
        weights = consolidated(model)
        with copy.swapped():
            average = consolidated(model)
        load_model(model, directory)
        train(model, range(STEPS - 1, STEPS))
        again = consolidated(model)
        results[stage] = {
            "norms": norms,
            **{name: listed(tensors) for name, tensors in (("weights", weights), ("average", average))},
            "resumed": listed(again) == listed(weights),
            "waits": waits,
        }
        model.engine.destroy()
    finish(world, folder / "small.json", results)


def listed(tensors: dict[str, Tensor] | None) -> list[list[float]]:
    """Returns the tensors as lists of numbers, [] on ranks without tensors."""
    return [] if tensors is None else [tensor.tolist() for tensor in tensors.values()]


def sums() -> None:
    """Sums a gradient of 1 and one of 2^-9, of which a sum in bf16 loses the second.

    Also counts the sums over ranks of an optimizer step with three micro-batches.
    """
    folder = Path(sys.argv[1])
    record = folder / f"rank{os.environ['RANK']}.jsonl"
    record_collectives(record)
    world, results = connect(5.0), {}
    for stage in range(4):
        for ranks in (64, 65):
            model = engine(world, Vectors((6,), torch.bfloat16), stage, "bf16", ranks)
            gradient = 1.0 if world.rank == 0 else 2.0**-9
            model.backward(model(torch.full((6,), gradient, dtype=torch.bfloat16)), last=True)
            found = torch.cat([part.flatten().float() for part in local_gradients(model.engine)])
            mean = world.max(found.max()).item()
            model.skip(overflow=False)
            before = len(read_calls(record))
            for i in range(3):
                model.backward(model(torch.ones(6, dtype=torch.bfloat16)), last=i == 2)
            during = read_calls(record)[before:]
            results[f"stage {stage} of {ranks}"] = [mean, [call.dtype for call in during if is_sum(call)]]
            model.skip(overflow=False)
            model.engine.destroy()
    finish(world, folder / "sums.json", results)


def is_sum(call: Call) -> bool:
    return call.name in ("all_reduce SUM", "reduce_scatter_tensor SUM")


def finish(world: World, file: Path, results: dict[Any, Any]) -> None:
    if world.is_main:
        file.write_text(json.dumps(results))
    world.close()
