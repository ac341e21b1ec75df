"""The protocol between a run (loop.py) and the stage that it trains, such as PPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.run.health import Health, TooManySkips
from ppo_ds.run.state import ExitReason
from ppo_ds.run.stopping import StopRequest
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.run.token_budgets import TokenBudgets
from ppo_ds.tracking.banner import Banner
from ppo_ds.types import Experience, Histogram, Metrics


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Services of a run that an optimizer step uses."""

    world: World
    timer: PhaseTimer
    health: Health  # counts skipped optimizer steps
    # prints an optimizer step of PPO: its number in the update, its rows and its losses
    report: Callable[[int, Experience, dict[str, Tensor]], None] | None = None


@dataclass(frozen=True, kw_only=True)
class RunContext(StepContext):
    """Services of a run that its stage uses: those of an optimizer step, and others."""

    run_dir: Path
    stop: StopRequest
    banner: Banner
    budgets: TokenBudgets


HELD_OUT, TRAIN_PROMPTS = "eval", "train_prompts"


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation, the same on every rank."""

    metrics: Metrics  # <data>/*
    # One row per response; the list may be empty. The keys of a row are "prompt" (unique; the report uses it
    # to match the rows of two evaluations), "asked" (the part of the prompt that the report shows),
    # "response" and "score".
    rows: list[dict[str, Any]]
    # HELD_OUT, or TRAIN_PROMPTS for prompts that the run trains on. The latter are not logged with the steps
    # and never select a checkpoint.
    data: str = HELD_OUT


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one training step, the unit of run.steps; a step may have several optimizer steps."""

    metrics: Metrics  # the same on every rank; includes health/skipped_steps, see metrics.step_metrics
    episodes: int  # samples of all ranks
    tokens: int  # trained tokens of all ranks; for PPO, the response tokens
    samples: list[dict[str, Any]] = field(default_factory=list)  # logged by rank 0
    histograms: dict[str, Histogram] = field(default_factory=dict)  # logged by rank 0
    # computes perf/* and mem/* from time/*; a collective
    performance: Callable[[Metrics], Metrics] = lambda costs: {}
    warnings: tuple[str, ...] = ()
    failure: tuple[ExitReason, str] | None = None  # error message that ends the run once the step is logged


@runtime_checkable
class Stateful(Protocol):
    """A component whose state a checkpoint saves as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Stage(Stateful, Protocol):
    """One kind of training; tests/run/toy_stage.py is a minimal stage. All ranks must call each method.

    ``state_dict`` is copied before every step, to undo the step. It must not have the key "progress", which
    the run adds.
    """

    models: Mapping[str, TrainedModel]  # saved in every checkpoint
    weight_copies: Mapping[str, WeightCopy]  # saved in every checkpoint
    data: Sequence[Fingerprint]  # of all data sets; every checkpoint saves them
    total_steps: int
    # metric name -> function that returns the count since its last call; called once per step
    counters: Mapping[str, Callable[[], float]]

    def start(self) -> None:
        """Prepares a new run after its first evaluation. Not called in a resumed run."""

    def step(self, index: int) -> StepResult:
        """Trains one step.

        Before any weight has changed, may raise Abandoned on a stop request, or StepRefused if the run must
        end. Also raises TooManySkips if Health does.
        """

    def evaluate(self) -> Evaluation | None:
        """Evaluates without affecting training; returns None without held-out data. May raise Abandoned."""

    def export(self, run_dir: Path) -> None:
        """Writes the trained models into the run directory."""

    def dump_failure(self, error: TooManySkips, step: int, run_dir: Path) -> str:
        """Writes files that reproduce the last skipped optimizer step; returns one line that describes it."""
