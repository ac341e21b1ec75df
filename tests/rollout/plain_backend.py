"""Implements a decode backend without a cache: one forward over all tokens for each new token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ppo_ds.distributed.heartbeat import beat
from ppo_ds.rollout.base import SamplingParams, truncate_at_stop
from ppo_ds.types import Prompts, Rollout


class PlainGenerator:
    """Samples from the whole distribution; ignores top_k other than 1, top_p and min_new_tokens."""

    def __init__(
        self,
        lm: Callable[[], nn.Module],
        *,
        tokenizer: Any,
        token_budget: int,  # unused: all rows are decoded at once
        lockstep_max: Callable[[int], int] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self.lm, self.tokenizer = lm, tokenizer
        self.lockstep_max, self.should_stop = lockstep_max, should_stop

    @torch.no_grad()
    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        lm = self.lm()
        device = next(lm.parameters()).device
        ids, mask = prompts.ids.to(device), prompts.mask.to(device)
        logprobs = torch.zeros(len(prompts), 0, device=device)
        for _ in range(sampling.max_new_tokens):  # the same number of forwards on every rank
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = lm(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
            table = (logits / sampling.temperature).log_softmax(-1)
            tokens = table.argmax(1, keepdim=True) if sampling.top_k == 1 else table.exp().multinomial(1)
            logprobs = torch.cat([logprobs, table.gather(1, tokens)], 1)
            ids, mask = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens).bool()], 1)
            beat()
            if (self.lockstep_max or int)(self.should_stop()):
                break
        responses = ids[:, prompts.ids.shape[1] :].cpu()
        return truncate_at_stop(
            prompts, responses, logprobs.cpu(), sampling=sampling, tokenizer=self.tokenizer
        ).trimmed()
