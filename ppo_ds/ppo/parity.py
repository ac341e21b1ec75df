"""Checks, at start-up and in each PPO step, that decode backend and training engine agree on log-probs.

Wrong position ids or masks show in a few tokens at start-up, stale weights only after an update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.errors import UserError
from ppo_ds.ppo.minibatches import scatter_tokens
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.microbatches import forward_rows, scoring_plan
from ppo_ds.run.stopping import StepRefused
from ppo_ds.types import Metrics, Prompts

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
    """Measures the gap between ``generator``'s log-probs of a few sampled tokens and the training engine's.

    A collective.
    """
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
class ParityMonitor:
    """Compares the gap of each PPO step with a limit."""

    highest: float | None  # nats per token; None: no limit
    stops: bool
    old_from_rollout: bool = False  # algo.old_logprobs=rollout, which excludes algo.rollout_is
    own_weights: bool = False  # the decode backend has weights of its own (rollout.backend=vllm)
    above: bool = False

    def stop_if_exceeded(self, mean: float) -> None:
        """Raises StepRefused if a mean gap above the limit ends the run.

        A gap that is not finite does not: first_nonfinite and step_or_skip find its cause.
        """
        if self.stops and self.exceeds(mean):
            raise StepRefused("max_parity", self.message(mean))

    def warning(self, metrics: Metrics) -> str | None:
        """Returns a message in the step in which the gap rises above the limit, otherwise None."""
        mean = metrics.get("parity/logp_abs_diff_mean")
        if mean is None:
            return None
        was_above, self.above = self.above, self.exceeds(mean)
        return self.message(mean) if self.above and not was_above else None

    def exceeds(self, mean: float) -> bool:
        return self.highest is not None and math.isfinite(mean) and mean > self.highest

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
