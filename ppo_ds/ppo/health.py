"""Health checks of PPO: non-finite numbers in an experience and the limit on the KL.

All ranks make the same decisions, since each rank holds the rows of all ranks and gets the same reduced sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.run.health import SkippedStep
from ppo_ds.types import Experience, Metrics

LABELS = {  # column -> label of one of its numbers, in the order in which the columns are computed
    "scores": "score",
    "decode_logprobs": "log-prob of token {} as it was generated",
    "logprobs": "log-prob of token {}",
    "old_logprobs": "log-prob of token {} under the old policy",
    "ref_logprobs": "log-prob of token {} under the reference",
    "values": "value of state {}",
    "rewards": "reward of token {}",
    "weights": "importance weight of token {}",
    "advantages": "advantage of token {}",
    "returns": "return of state {}",
}


@dataclass(frozen=True)
class NonFiniteStep(SkippedStep):
    """A skipped optimizer step of PPO, with the data that a replay needs.

    ``what`` may also name a column of the experience, such as "score" or "log-prob of token 17".
    """

    minibatch: Experience  # the rows of the step, from all ranks
    rows: Tensor  # [b] long: the index of each of these rows in the rollout
    row: int | None  # index in the rollout of the row that caused the skip; None if unknown
    rank: int | None  # the rank that generated that row
    kl_coef: float
    critic_only: bool


def first_nonfinite(experience: Experience) -> tuple[str, int] | None:
    """Returns the name and the row of the first non-finite number, or None.

    Columns are searched in the order of LABELS, each only where its mask is set.
    """
    actions = experience.response_mask
    masks = {
        **dict.fromkeys(
            ("decode_logprobs", "logprobs", "old_logprobs", "ref_logprobs", "weights", "advantages"), actions
        ),
        "scores": torch.ones_like(experience.scores, dtype=torch.bool),
        "rewards": pad(actions, (0, 1)),
    }
    if experience.value_mask is not None:
        masks |= dict.fromkeys(("values", "returns"), experience.value_mask)
    columns = experience.tensors()
    for name, label in LABELS.items():
        if name in columns:
            found = (~columns[name].isfinite() & masks[name]).nonzero()
            if len(found):
                row, *position = found[0].tolist()
                return label.format(*position), row
    return None


@dataclass
class KLMonitor:
    """Compares kl/k3_token_mean with a limit.

    k3 is never negative, whereas k1 is signed and becomes negative when a policy collapses.
    """

    highest: float | None  # nats per token; None: no limit
    stops: bool
    above: bool = False

    def exceeded(self, metrics: Metrics) -> str | None:
        """Returns a message in the step in which the KL rises above the limit, otherwise None."""
        kl = metrics.get("kl/k3_token_mean")
        if self.highest is None or kl is None:
            return None
        was_above, self.above = self.above, kl > self.highest
        if was_above or not self.above:
            return None
        return (
            f"kl/k3_token_mean={kl:.4g} nats per token is above health.max_kl={self.highest:g}: "
            "lower actor.optim.lr or algo.epochs, raise algo.kl.coef, or set algo.target_kl; "
            "health.kl_action says whether this stops the run"
        )
