"""Progress of a run and the reasons why it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo_ds.types import Metrics

ExitReason = Literal["done", "stop_at_step", "time_limit", "signal", "nonfinite", "max_kl"]

EXIT_CODES: dict[ExitReason, int] = {
    "done": 0,
    "stop_at_step": 0,
    "time_limit": 0,
    "signal": 143,
    "nonfinite": 1,
    "max_kl": 1,
}

RESUME_HINTS: dict[ExitReason, str] = {  # how a run that ended early continues from its last checkpoint
    "signal": "the same command goes on (run.resume=auto)",
    "max_kl": "the same command goes on (run.resume=auto)",
    "time_limit": "the same command goes on (run.resume=auto)",
    "stop_at_step": "the same command without run.stop_at_step goes on (run.resume=auto)",
}


@dataclass
class TrainState:
    """Progress of a run, saved in every checkpoint beside weights, optimizers and random states."""

    # progress
    step: int = 0  # completed steps
    episodes: int = 0  # samples so far
    tokens: int = 0  # sum of StepResult.tokens so far
    rollbacks: int = 0  # not reset by a rollback

    # evaluation
    best_score: float | None = None
    first_eval: Metrics | None = None
    last_eval: Metrics | None = None
    first_rows: list[dict[str, Any]] = field(default_factory=list)
    last_rows: list[dict[str, Any]] = field(default_factory=list)
    # metrics of the last step if a stop request interrupted its evaluation
    unevaluated: Metrics | None = None

    def heldout_metrics(self, names: Mapping[str, str]) -> dict[str, float]:
        """Returns heldout_<name>_<before|after> for the summary, without metrics that were not measured.

        ``names`` maps each name to its metric, such as accuracy to eval/accuracy.
        """
        evaluations = {"before": self.first_eval or {}, "after": self.last_eval or {}}
        return {
            f"heldout_{name}_{when}": metrics[metric]
            for name, metric in names.items()
            for when, metrics in evaluations.items()
            if metric in metrics
        }


def is_due(step: int, every: int | None) -> bool:
    """Returns whether ``step`` is a multiple of ``every``; False if ``every`` is None or 0."""
    return every is not None and every > 0 and step % every == 0
