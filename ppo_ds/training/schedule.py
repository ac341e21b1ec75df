"""What the PPO loop is to do when, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ppo_ds.types import Metrics

EXIT_CODES = {"done": 0, "stop_at_step": 0, "time_limit": 0, "signal": 143, "nonfinite": 1, "max_kl": 1}

GOES_ON = {  # how a run that was ended early goes on from its last checkpoint
    "signal": "the same command goes on (run.resume=auto)",
    "max_kl": "the same command goes on (run.resume=auto)",
    "time_limit": "the same command goes on (run.resume=auto)",
    "stop_at_step": "the same command without run.stop_at_step goes on (run.resume=auto)",
}


@dataclass(frozen=True)
class Schedule:
    """When what happens, in PPO steps. ``None`` or 0: never on the way (``checkpoint_every`` 0: not at the end either)."""

    total_steps: int
    stop_at_step: int | None
    eval_every: int | None
    checkpoint_every: int | None
    keep_best: bool
    critic_warmup: int  # the first steps, in which the critic alone learns
    critic_pretraining: int  # rollouts before the first step, on which the critic alone learns
    lag: int  # steps between two copies of a lagging old policy
    kl_after_update: bool
    samples_per_prompt: int
    sample_rows: int
    seed: int
    kl_metric: str  # the metric that the KL controller is fed with
    kl_target: float | None  # shown beside it; None for a fixed coefficient


@dataclass
class TrainState:
    """What a checkpoint remembers beside weights, optimizers and random states."""

    step: int = 0
    episodes: int = 0  # samples so far
    tokens: int = 0  # response tokens so far
    best_score: float | None = None
    first_eval: Metrics | None = None
    last_eval: Metrics | None = None
    first_rows: list[dict[str, Any]] = field(default_factory=list)
    last_rows: list[dict[str, Any]] = field(default_factory=list)
    skips: int = 0  # decisions to skip an optimizer step in a row, up to now
    rollbacks: int = 0  # of this run so far: going back does not go back on them
    unevaluated: Metrics | None = None  # the last step's line, where a signal has cut its evaluation short

    def held_out(self) -> dict[str, float]:
        """heldout_<name>_<before|after>, for the summary; what was not measured is left out."""
        measured = {"before": self.first_eval or {}, "after": self.last_eval or {}}
        return {
            f"heldout_{name}_{when}": found[f"eval/{name}"]
            for name in ("accuracy", "score_mean")
            for when, found in measured.items()
            if f"eval/{name}" in found
        }


class Stateful(Protocol):
    """A part of the loop that a checkpoint must remember, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def is_due(step: int, every: int | None) -> bool:
    return bool(every) and step % every == 0
