"""Health checks of PPO, with equal results on all ranks: non-finite numbers, the KL, parity of log-probs.

Parity: the log-probs of the decode backend are compared with those of the training engine. The check at
start-up detects wrong position ids or masks; the check in each step detects stale weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.errors import UserError
from ppo_ds.ppo.minibatches import scatter_tokens
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.run.health import SkippedStep
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.microbatches import forward_rows, scoring_plan
from ppo_ds.run.stopping import StepRefused
from ppo_ds.types import Experience, Metrics, Prompts

LABELS = {  # column -> label of an entry, in the order in which the columns are computed
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
    """A skipped optimizer step of PPO, with the data for a replay."""

    minibatch: Experience  # the rows of the step, from all ranks
    rows: Tensor  # [b] long: the index of each of these rows in the rollout
    row: int | None  # index in the rollout of the row that caused the skip; None if unknown
    rank: int | None  # the rank that generated that row
    kl_coef: float
    critic_only: bool


def first_nonfinite(experience: Experience) -> tuple[str, int] | None:
    """Returns (label, row) of the first non-finite number with mask = 1, in the order of LABELS, or None."""
    actions, columns = experience.response_mask, experience.tensors()
    masks = {  # of the columns that do not have the mask of the actions
        "scores": torch.ones_like(experience.scores, dtype=torch.bool),
        "rewards": pad(actions, (0, 1)),
        **dict.fromkeys(("values", "returns"), experience.value_mask),
    }
    for name, label in LABELS.items():
        if name in columns:
            found = (~columns[name].isfinite() & masks.get(name, actions)).nonzero()
            if len(found):
                row, *position = found[0].tolist()
                return label.format(*position), row
    return None


# -- parity of log-probs, limits ----------------------------------------------------------------------

PARITY_ROWS, PARITY_TOKENS = 8, 16  # rows per rank, and new tokens per row

# Largest allowed mean |difference| per token, in nats. Rounding errors of the dtype are well below these
# bounds, real errors far above them (left padding without position ids changes GPT-2's log-probs by 0.1 and
# more).
BOUNDS = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


Gap = tuple[float, float]  # mean and max |log-prob difference| per token, nats


class ParityError(UserError):
    """Raised, on all ranks, if decoding and training disagree on the log-probs of the same tokens."""


@torch.no_grad()
def parity_gap(
    prompts: Prompts, *, actor: HybridActor, generator: Generator, sampling: SamplingParams, token_budget: int
) -> Gap:
    """Measures the gap between log-probs of generation and of training. All ranks must call this."""
    few = prompts.select(torch.arange(min(PARITY_ROWS, len(prompts))))
    short = replace(sampling, max_new_tokens=min(PARITY_TOKENS, sampling.max_new_tokens), min_new_tokens=0)
    with actor.generation_mode():
        rollout = generator(few, short)
    plan = scoring_plan(rollout, token_budget, actor.world)
    logprobs = scatter_tokens([out.logprobs for out in forward_rows(actor, rollout, plan)], rollout, plan)
    gap = (rollout.logprobs - logprobs).abs().masked_fill(~rollout.response_mask, 0.0)
    sums = MetricSums()
    sums.add_mean("mean", gap, rollout.response_mask)
    sums.add_max("max", gap.max())
    found = sums.reduced(actor.world)
    return found["mean"], found["max"]


def disagreement(gap: Gap, dtype: str) -> str | None:
    """Returns an error message if ``gap`` exceeds the bound of ``dtype``, otherwise None."""
    mean, largest = gap
    if mean <= BOUNDS[dtype]:
        return None
    return (
        f"generation and training disagree: log-probs of the same tokens differ by {mean:.4g} nats on "
        f"average (at most {largest:.4g}), allowed for {dtype} is {BOUNDS[dtype]:.4g}"
    )


@dataclass
class Limit:
    """An upper limit of a metric."""

    highest: float | None  # nats per token; None: no limit
    stops: bool  # whether the run ends if the metric exceeds the limit
    above: bool = False  # whether the metric exceeded the limit in the last call of ``rises``

    def exceeds(self, value: float) -> bool:
        return self.highest is not None and math.isfinite(value) and value > self.highest

    def rises(self, value: float) -> bool:
        """Returns True if ``value`` is above the limit, but the value in the previous call was not."""
        was_above, self.above = self.above, self.exceeds(value)
        return self.above and not was_above


class KLMonitor(Limit):
    """Compares kl/k3_token_mean with a limit.

    k3 is never negative, whereas k1 is signed and becomes negative if the policy collapses.
    """

    def warning(self, metrics: Metrics) -> str | None:
        """Returns a message at a step in which the KL rises above the limit, otherwise None."""
        kl = metrics.get("kl/k3_token_mean")
        if kl is None or not self.rises(kl):
            return None
        return (
            f"kl/k3_token_mean={kl:.4g} nats per token is above health.max_kl={self.highest:g}: "
            "lower actor.optim.lr or algo.epochs, raise algo.kl.coef, or set algo.target_kl; "
            "health.kl_action says whether this stops the run"
        )


@dataclass
class ParityMonitor(Limit):
    """Compares the log-prob gap of each PPO step with a limit."""

    old_from_rollout: bool = False  # algo.old_logprobs=rollout, which excludes algo.rollout_is
    own_weights: bool = False  # the decode backend holds a copy of the weights (rollout.backend=vllm)

    def stop_if_exceeded(self, mean: float) -> None:
        """Raises StepRefused if ``stops`` and ``mean`` is above the limit; ignores a non-finite ``mean``."""
        if self.stops and self.exceeds(mean):
            raise StepRefused("max_parity", self.message(mean))

    def warning(self, metrics: Metrics) -> str | None:
        """Returns a message at a step in which the gap rises above the limit, otherwise None."""
        mean = metrics.get("parity/logp_abs_diff_mean")
        return self.message(mean) if mean is not None and self.rises(mean) else None

    def message(self, mean: float) -> str:
        cause = "the decode backend probably has stale weights, so use another rollout.backend"
        if self.own_weights:
            cause = (
                "the engine of rollout.backend=vllm probably has stale weights, because the sync did not "
                "send some names or vLLM ignored them, so report the model"
            )
        weights = "algo.rollout_is.kind"
        if self.old_from_rollout:
            weights = f"algo.old_logprobs=recompute and {weights}"
        return (
            f"parity/logp_abs_diff_mean={mean:.4g} nats per token is above health.max_parity="
            f"{self.highest:g}: {cause}; if the gap is rounding, set {weights} and raise health.max_parity; "
            "health.parity_action says whether this stops the run"
        )
