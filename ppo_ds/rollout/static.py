"""Decode backend with a preallocated cache of slots, continuous batching and one prefill per prompt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.distributed.heartbeat import counting
from ppo_ds.models.linear import packed_weights
from ppo_ds.rollout.base import SamplingParams, max_new_tokens, truncate_at_stop
from ppo_ds.rollout.continuous_batch import ContinuousBatch
from ppo_ds.rollout.decoding import explicit_mask_attention
from ppo_ds.rollout.graphs import Graphs, recorder_for
from ppo_ds.types import Prompts, Rollout, to_device


class StaticGenerator:
    """Decodes with as many cache slots as ``token_budget`` allows, at least one.

    Each slot has room for the longest row, that is, its prompt and its limit.

    The arguments are those of ``Generator`` and ``check_every``, the number of decode steps between two
    checks for responses that have ended. The host waits for the device at each check. The default is 1 on a
    CPU, where a check costs nothing, and 16 on a GPU. ``should_stop`` is called at every check.
    """

    def __init__(
        self,
        lm: Callable[[], nn.Module],
        *,
        tokenizer: Any,
        token_budget: int,
        lockstep_max: Callable[[int], int] | None = None,
        check_every: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self.lm = lm
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.lockstep_max = lockstep_max
        self.check_every = check_every
        self.should_stop = should_stop
        # False after a failed CUDA graph capture. Also False in lockstep, where weights are gathered for each
        # forward and have no fixed addresses.
        self.graphs_work = lockstep_max is None

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        lm = self.lm()
        device, limits = next(lm.parameters()).device, max_new_tokens(prompts, sampling)
        uniforms = torch.rand(len(prompts), int(limits.max()), dtype=torch.float64, device=device)
        responses, logprobs = torch.zeros(uniforms.shape, dtype=torch.long), torch.zeros(uniforms.shape)
        bands = [torch.arange(len(prompts))]
        if self.lockstep_max is None:
            bands = length_bands(prompts.mask.sum(1) + limits, self.token_budget)
        with (
            explicit_mask_attention(lm),
            # in lockstep, weights are gathered for each forward
            nullcontext() if self.lockstep_max else packed_weights(lm, products=int(limits.max())),
            counting(len(bands), "groups of rows") as done,
        ):
            for number, rows in enumerate(bands, start=1):
                batch = ContinuousBatch(
                    lm,
                    prompts.select(rows),
                    sampling,
                    uniforms[to_device(rows, device), : int(limits[rows].max())],
                    token_budget=self.token_budget,
                    tokenizer=self.tokenizer,
                    lockstep_max=self.lockstep_max,
                    check_every=self.check_every,
                    should_stop=self.should_stop,
                    graphs=Graphs(recorder_for(device) if self.graphs_work else None),
                )
                batch.decode_all()
                self.graphs_work &= batch.graphs.failure is None
                new, new_logprobs = batch.slots.responses[:-1].cpu(), batch.slots.logprobs[:-1].cpu()
                batch.graphs.close()
                responses[rows, : new.shape[1]], logprobs[rows, : new.shape[1]] = new, new_logprobs
                done(number)
        return truncate_at_stop(
            prompts, responses, logprobs, sampling=sampling, tokenizer=self.tokenizer
        ).trimmed()


def length_bands(totals: Tensor, token_budget: int) -> list[Tensor]:
    """Groups rows that are decoded together: all rows if they fit, else rows of similar length.

    ``totals`` [B] are the lengths of the rows, prompt and limit together. All slots of a group are as long as
    its longest row, so grouping a long prompt with many short ones would waste memory.
    """
    longest = int(totals.max())
    if token_budget // longest >= len(totals):
        return [torch.arange(len(totals))]
    # within a group no row is four times as long as another
    sizes = (longest / totals).log2().div(2).floor()
    return [(sizes == size).nonzero()[:, 0] for size in sizes.unique()]
