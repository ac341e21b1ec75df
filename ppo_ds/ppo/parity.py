"""The start-up gate: what decodes and what trains must be the same model.

Wrong position ids, masks, a cache in another dtype or a twin with stale weights make generation-time log-probs differ from those of
the training engine; learning then fails slowly and looks like bad tuning. A few tokens at the start tell.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.ppo.experience import logprobs_of
from ppo_ds.ppo.scoring import score_tokens, scoring_plan
from ppo_ds.rollout.base import Generator, SamplingParams
from ppo_ds.training.metrics import MetricSums
from ppo_ds.types import Prompts

GATE_PROMPTS, GATE_TOKENS = 8, 16

# mean |difference| per token, nats. Rounding of a forward in the dtype stays well below; an error of substance is far above
# (left padding without position ids moves GPT-2's log-probs by 0.1 and more).
BOUNDS = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


Gap = tuple[float, float]  # mean, max |log-prob difference| per token, nats


class ParityError(RuntimeError):
    """Decoding and training disagree on the log-probs of the same tokens."""


@torch.no_grad()
def parity_gap(
    prompts: Prompts, *, actor: HybridActor, generator: Generator, sampling: SamplingParams, token_budget: int
) -> Gap:
    """What ``generator`` says of the tokens that it draws, against what the training engine says of them, over all ranks. A collective."""
    few = prompts.select(torch.arange(min(GATE_PROMPTS, len(prompts))))
    short = replace(sampling, max_new_tokens=min(GATE_TOKENS, sampling.max_new_tokens), min_new_tokens=0)
    with actor.generation_mode():
        rollout = generator(few, short)
    logprobs = score_tokens(logprobs_of(actor), rollout, scoring_plan(rollout, token_budget, actor.world))
    gap = (rollout.logprobs - logprobs).abs().masked_fill(~rollout.response_mask, 0.0)
    sums = MetricSums()
    sums.add_mean("mean", gap, rollout.response_mask)
    sums.add_max("max", gap.max())
    found = sums.reduced(actor.world)
    return found["mean"], found["max"]


def disagreement(gap: Gap, dtype: str) -> str | None:
    """What is wrong with a gap that is out of bounds for a model in ``dtype``; None within."""
    mean, largest = gap
    if mean <= BOUNDS[dtype]:
        return None
    return (
        f"generation and training disagree: log-probs of the same tokens differ by {mean:.4g} nats on average "
        f"(at most {largest:.4g}), allowed for {dtype} is {BOUNDS[dtype]:.4g}"
    )
