"""Decode backend with a preallocated cache of slots, continuous batching and one prefill per prompt."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppo_ds.distributed.heartbeat import counting
from ppo_ds.models.linear import packed_weights
from ppo_ds.rollout.base import (
    Continuation,
    DecodeBackend,
    SamplingParams,
    draw_uniforms,
    max_new_tokens,
    truncate_at_stop,
)
from ppo_ds.rollout.continuous_batch import ContinuousBatch
from ppo_ds.rollout.decoding import explicit_mask_attention
from ppo_ds.rollout.graphs import Graphs, recorder_for
from ppo_ds.types import Prompts, Rollout, to_device


@dataclass
class StaticGenerator(DecodeBackend):
    """Decodes with as many cache slots as ``token_budget`` allows, at least one.

    Each slot has room for the longest row, the sum of a prompt and its limit of new tokens.

    The arguments are those described in ``Generator``, and ``check_every``, the number of decode steps
    between two checks for responses that have ended. The host waits for the device at each check. The default
    is 1 on a CPU, where a check costs nothing, and 16 on a GPU. ``should_stop`` is called at every check.
    """

    check_every: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # False after a failed CUDA graph capture. Also False in lockstep, where weights are gathered for each
        # forward and have no fixed addresses.
        self.graphs_work = self.lockstep_max is None

    def __call__(
        self, prompts: Prompts, sampling: SamplingParams, continuation: Continuation | None = None
    ) -> Rollout:
        lm = self.lm()
        device, limits = next(lm.parameters()).device, max_new_tokens(prompts, sampling)
        uniforms = draw_uniforms(prompts, limits, device)
        responses, logprobs = torch.zeros(uniforms.shape, dtype=torch.long), torch.zeros(uniforms.shape)
        lengths, bands = torch.zeros_like(limits), [torch.arange(len(prompts))]
        # the rows of a continuation are decoded together, because the first group could otherwise interrupt
        # all later groups
        if self.lockstep_max is None and continuation is None:
            bands = length_bands(prompts.mask.sum(1) + limits, self.token_budget)
        with (
            explicit_mask_attention(lm),
            # in lockstep, weights are gathered for each forward
            nullcontext() if self.lockstep_max else packed_weights(lm, products=int(limits.max())),
            counting(len(bands), "groups of rows") as done,
        ):
            for number, rows in enumerate(bands, start=1):
                batch = ContinuousBatch(
                    self,
                    lm,
                    prompts.select(rows),
                    sampling,
                    uniforms[to_device(rows, device), : int(limits[rows].max())],
                    continuation,
                    check_every=self.check_every,
                    graphs=Graphs(recorder_for(device) if self.graphs_work else None),
                )
                batch.decode_all()
                self.graphs_work &= batch.graphs.failure is None
                new, new_logprobs = batch.slots.responses[:-1].cpu(), batch.slots.logprobs[:-1].cpu()
                lengths[rows] = batch.lengths()
                batch.graphs.close()
                responses[rows, : new.shape[1]], logprobs[rows, : new.shape[1]] = new, new_logprobs
                done(number)
        return truncate_at_stop(
            prompts, responses, logprobs, sampling=sampling, tokenizer=self.tokenizer, lengths=lengths
        ).trimmed()


def length_bands(totals: Tensor, token_budget: int) -> list[Tensor]:
    """Groups rows that are decoded together: all rows if they fit, else rows of similar length.

    ``totals`` [B] are the lengths of the rows (prompt + limit). All slots of a group are as long as the
    group's longest row, so grouping a long prompt with many short prompts would waste memory.
    """
    longest = int(totals.max())
    if token_budget // longest >= len(totals):
        return [torch.arange(len(totals))]
    # within a group no row is four times as long as another
    sizes = (longest / totals).log2().div(2).floor()
    return [(sizes == size).nonzero()[:, 0] for size in sizes.unique()]
