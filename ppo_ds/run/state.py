"""Progress of a run and the reasons why it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo_ds.errors import UserError
from ppo_ds.types import Metrics

ExitReason = Literal[
    "done",
    "early_stop",
    "stop_at_step",
    "time_limit",
    "signal",
    "nonfinite",
    "max_kl",
    "max_parity",
    "reward_error",
]

EXIT_CODES: dict[ExitReason, int] = {
    "done": 0,
    "early_stop": 0,
    "stop_at_step": 0,
    "time_limit": 0,
    "signal": 143,
    "nonfinite": 1,
    "max_kl": 1,
    "max_parity": 1,
    "reward_error": 1,
}

RESUME_HINTS: dict[ExitReason, str] = {  # how a run that ended early continues from its last checkpoint
    "signal": "the same command continues (run.resume=auto)",
    "max_kl": "the same command continues (run.resume=auto)",
    "max_parity": "the same command repeats the step (run.resume=auto)",
    "reward_error": "once the reward is corrected, the same command continues (run.resume=auto)",
    "time_limit": "the same command continues (run.resume=auto)",
    "early_stop": "the same command with a larger eval.patience continues (run.resume=auto)",
    "stop_at_step": "the same command without run.stop_at_step continues (run.resume=auto)",
}


@dataclass(frozen=True)
class Selection:
    """Rule by which evaluations are compared, to select the best checkpoint and to stop early."""

    metric: str  # eval/...
    lower_is_better: bool = False
    patience: int | None = None  # evaluations in a row without improvement that end the run; None: no limit

    @property
    def rule(self) -> str:
        """The rule in words, such as "lowest eval/loss"; scores of different rules cannot be compared."""
        return f"{'lowest' if self.lower_is_better else 'highest'} {self.metric}"

    def score(self, metrics: Metrics) -> float:
        """Returns the metric as a score; a higher score is better.

        Raises UserError if ``metrics`` lacks it, such as the accuracy on a subset that the data do not have.
        """
        if self.metric not in metrics:
            raise UserError(
                f"checkpoint.best_by={self.metric}: the evaluation does not measure it; use one of "
                f"{', '.join(name for name in metrics if name.startswith('eval/'))}"
            )
        return -metrics[self.metric] if self.lower_is_better else metrics[self.metric]


@dataclass
class TrainState:
    """Progress of a run, saved in every checkpoint with weights, optimizers and random states."""

    # progress
    step: int = 0  # completed steps
    episodes: int = 0  # samples so far
    tokens: int = 0  # sum of StepResult.tokens so far
    rollbacks: int = 0  # not reset by a rollback

    # evaluation
    best_score: float | None = None  # Selection.score of the best checkpoint
    best_step: int | None = None  # its step
    best_rule: str | None = None  # Selection.rule by which it is the best
    evals_without_improvement: int = 0  # evaluations in a row
    first_eval: Metrics | None = None
    last_eval: Metrics | None = None
    last_eval_step: int | None = None  # also None in checkpoints of earlier versions
    first_rows: list[dict[str, Any]] = field(default_factory=list)
    last_rows: list[dict[str, Any]] = field(default_factory=list)
    # metrics of the last step if its evaluation was interrupted
    unevaluated: Metrics | None = None

    def select_by(self, rule: str) -> None:
        """Forgets the best checkpoint if it was selected by a rule other than ``rule``."""
        if self.best_rule not in (None, rule):
            self.best_score, self.best_step, self.evals_without_improvement = None, None, 0
        self.best_rule = rule

    def is_improvement(self, score: float) -> bool:
        """Returns whether a score is better than the best checkpoint's. NaN never is."""
        return score > (-math.inf if self.best_score is None else self.best_score)

    def count_evaluation(self, score: float) -> None:
        improved = self.is_improvement(score)
        self.evals_without_improvement = 0 if improved else self.evals_without_improvement + 1

    def best_metrics(self, selection: Selection) -> dict[str, Any]:
        if self.best_score is None or self.best_step is None:
            return {}
        value = -self.best_score if selection.lower_is_better else self.best_score
        return {"best_step": self.best_step, "best_by": selection.metric, "best_value": value}

    def heldout_metrics(self, names: Mapping[str, str]) -> dict[str, float]:
        """Returns heldout_<name>_<before|after> for the summary, for the metrics that were measured.

        If the run has no held-out data, the prefix is train_prompts_. ``names`` maps each name to its metric.
        """
        evaluations = {"before": self.first_eval or {}, "after": self.last_eval or {}}
        return {
            f"{prefix}_{name}_{when}": metrics[f"{data}/{metric.removeprefix('eval/')}"]
            for prefix, data in (("heldout", "eval"), ("train_prompts", "train_prompts"))
            for name, metric in names.items()
            for when, metrics in evaluations.items()
            if f"{data}/{metric.removeprefix('eval/')}" in metrics
        }


def is_due(step: int, every: int | None) -> bool:
    """Returns whether ``step`` is a multiple of ``every``; False if ``every`` is None or 0."""
    return every is not None and every > 0 and step % every == 0
