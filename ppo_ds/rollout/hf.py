"""The plain decode backend: transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.models.generation import generate
from ppo_ds.rollout.base import Sampling, finish
from ppo_ds.types import Prompts, Rollout


class HFGenerator:
    """Decodes a rank's prompts in chunks of at most ``token_budget`` tokens (prompt and answer, padding counted)."""

    def __init__(self, lm: Callable[[], nn.Module], *, tokenizer: Any, token_budget: int):
        """``lm`` gives the model to decode with: it is asked inside generation mode only."""
        self.lm = lm
        self.tokenizer = tokenizer
        self.token_budget = token_budget

    def __call__(self, prompts: Prompts, sampling: Sampling) -> Rollout:
        lm = self.lm()
        device = next(lm.parameters()).device
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)  # a special token's text can be a stop string too
        n, width = len(prompts), sampling.max_new_tokens
        responses = torch.full((n, width), self.tokenizer.pad_id)
        logprobs = torch.zeros(n, width)
        for rows in self._chunks(prompts, width):
            chunk = prompts.select(rows)
            longest = int(chunk.mask.sum(1).max())
            new, new_logprobs = generate(
                lm,
                chunk.ids[:, -longest:].to(device),
                chunk.mask[:, -longest:].to(device),
                max_new_tokens=sampling.max_new_tokens,
                min_new_tokens=sampling.min_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=sampling.stop_token_ids,
                stop_strings=sampling.stop_strings,
                pad_id=self.tokenizer.pad_id,
                decode=decode,
            )
            responses[rows, : new.shape[1]] = new.cpu()
            logprobs[rows, : new.shape[1]] = new_logprobs.cpu()
        rollout = finish(prompts, responses, logprobs, sampling=sampling, pad_id=self.tokenizer.pad_id, decode=decode)
        return rollout.trimmed()

    def _chunks(self, prompts: Prompts, new_tokens: int) -> Iterator[Tensor]:
        """Row indices, longest prompts first, so that neighbours share a width."""
        lengths = prompts.mask.sum(1)
        order = lengths.argsort(descending=True, stable=True)
        start = 0
        while start < len(order):
            rows = max(1, self.token_budget // (int(lengths[order[start]]) + new_tokens))
            yield order[start : start + rows]
            start += rows
