"""Takes the optimizer step of ppo_ds/finetune/ on two ranks and compares it with plain torch."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ppo_ds.distributed.world import World, connect
from ppo_ds.engine.trained import LRSchedule, TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.finetune.optimizer_step import OptimizerStep, SkippedBatch
from ppo_ds.run.health import Health, TooManySkips
from ppo_ds.run.stage import RunContext
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.tracking.banner import Banner
from tests.support.budgets import fixed_budgets

LR = 0.01
X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
# micro-batches of different sizes on two ranks, which have different numbers of rows
MICROS = {0: [X[:1], X[1:3]], 1: [X[3:8], X[8:]]}


def make_step(world: World) -> OptimizerStep:
    torch.manual_seed(0)
    model = TrainedModel(
        nn.Linear(3, 1, bias=False),
        world=world,
        deepspeed_config=deepspeed_config(stage=2, dtype="fp32", raw={}),
        schedule=LRSchedule(LR, "constant", 0.0, 0.1, 10),
        betas=(0.0, 0.0),
        eps=1e-12,
        weight_decay=0.0,
    )
    context = RunContext(
        world=world,
        run_dir=Path(),
        stop=types.SimpleNamespace(),
        timer=PhaseTimer(world.device),
        health=Health(2),
        banner=Banner(),
        budgets=fixed_budgets(world),
    )
    return OptimizerStep(
        context=context,
        name="actor",
        prefix="sft",
        model=model,
        ema=WeightCopy(model),
        ema_decay=0.5,
        capacity=None,
        cost=None,
    )


def mean_square(step: OptimizerStep, scale: float = 1.0) -> Callable[[Tensor], tuple[Tensor, dict]]:
    """Returns the function that computes a micro-batch's part of the mean over all rows of X."""

    def compute_loss(micro: Tensor) -> tuple[Tensor, dict]:
        squares = step.model(micro).squeeze(-1).square() * scale
        parts = {"sft/loss": torch.stack([squares.detach().sum(), torch.tensor(len(micro))])}
        return squares.sum() * step.context.world.size / len(X), parts

    return compute_loss


def check_mean(step: OptimizerStep) -> None:
    world, weight = step.context.world, step.model.module.weight
    reference = weight.detach().clone().requires_grad_()
    loss = (X @ reference.T).square().mean()
    loss.backward()
    before, sign = reference.detach(), reference.grad.sign()
    metrics = step(X, MICROS[world.rank], mean_square(step))
    # without momentum AdamW moves each weight by the learning rate, against the sign of its gradient
    torch.testing.assert_close(weight.detach(), before - LR * sign)
    assert math.isclose(metrics["sft/loss"], float(loss), rel_tol=1e-6)
    assert math.isclose(metrics["sft/grad_norm"], float(reference.grad.norm()), rel_tol=1e-5)
    assert metrics["sft/lr"] == LR and metrics["health/skipped_steps"] == 0
    with step.ema.swapped():
        torch.testing.assert_close(weight.detach(), before - 0.5 * LR * sign)


def check_skips(step: OptimizerStep) -> None:
    """The loss is not finite on rank 1 only; no rank takes the step."""
    world, weight = step.context.world, step.model.module.weight
    before = weight.detach().clone()
    scale = math.nan if world.rank == 1 else 1.0
    metrics = step(X, MICROS[world.rank], mean_square(step, scale))
    assert metrics["health/skipped_steps"] == 1 and math.isnan(metrics["sft/loss"])
    assert step.context.health.take_reasons() == ["loss of the actor", "gradient of the actor"]
    try:
        step(X, MICROS[world.rank], mean_square(step, scale))
    except TooManySkips as error:
        assert isinstance(error.last_skip, SkippedBatch) and error.last_skip.batch is X
    else:
        raise AssertionError("the second skip in a row did not raise")
    assert torch.equal(weight, before) and step.model.steps == 1


def main() -> None:
    step = make_step(connect(5))
    check_mean(step)
    check_skips(step)
