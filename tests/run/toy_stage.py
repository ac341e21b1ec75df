"""Implements a second stage for ``Run``: least squares on one DeepSpeed engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import nn

import launch.train
from ppo_ds.config.registry import STAGES, StageEntry
from ppo_ds.config.schema import Config
from ppo_ds.config.sections.models import ActorConfig
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import seed_everything
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.lockstep import step_or_skip
from ppo_ds.engine.trained import LRSchedule, TrainedModel
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.run.health import SkippedStep, TooManySkips
from ppo_ds.run.stage import Evaluation, RunContext, StepResult

ROWS = 8  # per rank and step
TARGET = torch.tensor([[1.0, -2.0, 0.5, 3.0]])


class ToyConfig(Config):
    """The settings of the stage."""

    trained = averaged = ("actor",)
    stage: Literal["toy"] = "toy"
    actor: ActorConfig


class ToyStage:
    """Fits a linear map to TARGET on random rows, which depend only on the random state of the rank."""

    def __init__(self, config: ToyConfig, context: RunContext):
        self.context, self.total_steps = context, config.run.steps
        optim = config.actor.optim
        self.model = TrainedModel(
            nn.Linear(TARGET.shape[1], 1),
            world=context.world,
            deepspeed_config=deepspeed_config(stage=config.actor.zero.stage, dtype="fp32", raw={}),
            schedule=LRSchedule(optim.lr, "cosine", 0.0, 0.1, self.total_steps),
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=0.0,
        )
        self.models, self.weight_copies, self.counters = {"regression": self.model}, {}, {}
        self.data = []
        self.offset = 0.0  # offset of the targets; a state besides weights and random states
        seed_everything(config.run.seed + 1 + context.world.rank)

    def start(self) -> None:
        self.offset = 1.0

    def step(self, index: int) -> StepResult:
        with self.context.timer("draw"):
            rows = torch.randn(ROWS, TARGET.shape[1])
            self.offset *= 0.5
            fault("toy.draw")
        self.context.stop.raise_if_stopped()
        loss = self.loss(rows)
        try:
            fault("toy.loss")
        except RuntimeError:  # a test injects a NaN loss
            loss = loss * torch.nan
        self.model.backward(loss, last=True)
        result = step_or_skip(
            self.models,
            {"regression": loss.detach()},
            loss.detach()[None],
            world=self.context.world,
            timer=self.context.timer,
        )
        metrics = {
            "toy/loss": result.sums[0] / self.context.world.size,
            "toy/offset": self.offset,
            "health/skipped_steps": float(bool(result.nonfinite)),
        }
        if result.nonfinite:
            self.context.health.record_skip(SkippedStep(result.nonfinite))
        else:
            self.context.health.record_step()
        samples = [{"prompt": f"step {index}", "response": str(rows[0].tolist())}]
        return StepResult(metrics=metrics, episodes=ROWS * self.context.world.size, tokens=0, samples=samples)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.model(rows) - rows @ TARGET.T - self.offset).square().mean()

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        rows = torch.eye(TARGET.shape[1])
        row = {"prompt": "eye", "asked": "eye", "response": "y", "score": -float(self.loss(rows))}
        return Evaluation({"eval/score_mean": row["score"]}, [row])

    def export(self, run_dir: Path) -> None:
        weights = consolidated(self.model)
        if weights is not None:
            (run_dir / "model").mkdir(exist_ok=True)
            save_file(weights, run_dir / "model" / "model.safetensors")

    def dump_failure(self, error: TooManySkips, step: int, run_dir: Path) -> str:
        return f"step {step}: not finite: {error}"

    def state_dict(self) -> dict:
        return {"targets": {"offset": self.offset}}

    def load_state_dict(self, state: dict) -> None:
        self.offset = state["targets"]["offset"]


def main(argv: list[str]) -> int:
    """Runs launch/train.py with this stage added."""
    STAGES["toy"] = StageEntry(
        "tests.run.toy_stage.ToyStage", "Least squares.", heldout={"score_mean": "eval/score_mean"}
    )
    return launch.train.main(argv)
