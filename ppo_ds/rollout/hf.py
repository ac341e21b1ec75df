"""The plain decode backend: transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.ops.batching import plan_microbatches
from ppo_ds.rollout.base import SamplingParams, finish, limits_of, never
from ppo_ds.rollout.hf_generate import generate
from ppo_ds.types import Prompts, Rollout


class HFGenerator:
    """Decodes a rank's prompts in chunks of at most ``token_budget`` tokens (prompt and answer, padding counted)."""

    def __init__(
        self,
        lm: Callable[[], nn.Module],
        *,
        tokenizer: Any,
        token_budget: int,
        agree: Callable[[int], int] | None = None,
        stopped: Callable[[], bool] = never,
    ):
        """``lm`` gives the model to decode with: it is asked inside generation mode only.

        ``agree``: the largest of the ranks' numbers, where the ranks hold the model together and must run its forwards in step.
        ``stopped``: whether the answers are no longer wanted; see Generator. Asked at every token.
        """
        self.lm = lm
        self.agree = agree
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.stopped = stopped

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        lm = self.lm()
        device = next(lm.parameters()).device
        decode = partial(
            self.tokenizer.decode, skip_special_tokens=False
        )  # a special token's text can be a stop string too
        lengths, limits = prompts.mask.sum(1), limits_of(prompts, sampling)
        shape = (len(prompts), int(limits.max()))
        responses, logprobs = torch.full(shape, self.tokenizer.pad_id), torch.zeros(shape)
        for rows in self._plan(lengths, limits):  # the longest first, so that neighbours share a width
            if (self.agree or int)(self.stopped()):
                break
            chunk, longest = prompts.select(rows), int(lengths[rows].max())
            new, new_logprobs = generate(
                lm,
                chunk.ids[:, -longest:].to(device),
                chunk.mask[:, -longest:].to(device),
                limits[rows],
                min_new_tokens=sampling.min_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=sampling.stop_token_ids,
                stop_strings=sampling.stop_strings,
                pad_id=self.tokenizer.pad_id,
                decode=decode,
                in_step=self.agree is not None,
                stopped=self.stopped,
            )
            responses[rows, : new.shape[1]] = new.cpu()
            logprobs[rows, : new.shape[1]] = new_logprobs.cpu()
        rollout = finish(
            prompts, responses, logprobs, sampling=sampling, pad_id=self.tokenizer.pad_id, decode=decode
        )
        return rollout.trimmed()

    def _plan(self, lengths: Tensor, limits: Tensor) -> list[Tensor]:
        """Rows of each chunk: as many chunks on every rank, where they go in step."""
        chunks = plan_microbatches(lengths, limits, self.token_budget)
        return (
            chunks
            if self.agree is None
            else plan_microbatches(lengths, limits, self.token_budget, at_least=self.agree(len(chunks)))
        )
