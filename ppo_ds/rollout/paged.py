"""The decode backend on transformers' continuous batching: see rollout/paging.py for what it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ppo_ds.rollout.base import SamplingParams, finish, limits_of, never
from ppo_ds.rollout.paging import generate_paged
from ppo_ds.types import Prompts, Rollout


def unsupported(sampling: SamplingParams) -> str | None:
    """The keys that this backend cannot honour, and why; None where it can."""
    part = "its log-probs would be those of the tokens that are left, not of the whole distribution"
    wrong = [
        line
        for line, is_set in (
            (
                f"sampling.stop={list(sampling.stop_strings)} (it ends answers at token ids only: sampling.stop_token_ids)",
                sampling.stop_strings,
            ),
            (
                f"sampling.min_new_tokens={sampling.min_new_tokens} (it cannot hold end tokens back)",
                sampling.min_new_tokens,
            ),
            (f"sampling.top_k={sampling.top_k} ({part})", sampling.top_k > 1),
            (f"sampling.top_p={sampling.top_p:g} ({part})", sampling.top_p < 1 and sampling.top_k != 1),
        )
        if is_set
    ]
    return f"does not do {', '.join(wrong)}" if wrong else None


class PagedGenerator:
    """Decodes all of a rank's prompts at once, as far as a cache of ``token_budget`` tokens allows; the others wait their turn."""

    def __init__(
        self,
        lm: Callable[[], nn.Module],
        *,
        tokenizer: Any,
        token_budget: int,
        stopped: Callable[[], bool] = never,
    ):
        """``lm`` gives the model to decode with: it is asked inside generation mode only.

        ``stopped``: whether the answers are no longer wanted; see Generator. Asked at every answer, and every second.
        """
        self.lm = lm
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.stopped = stopped

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        assert unsupported(sampling) is None, "refused before training starts"
        limits, pad_id = limits_of(prompts, sampling), self.tokenizer.pad_id
        answers = generate_paged(
            self.lm(),
            [ids[mask].tolist() for ids, mask in zip(prompts.ids, prompts.mask, strict=True)],
            limits.tolist(),
            temperature=sampling.temperature,
            greedy=sampling.top_k == 1,
            stop_token_ids=sampling.stop_token_ids,
            pad_id=pad_id,
            cache_tokens=self.token_budget,
            stopped=self.stopped,
        )
        shape = (len(prompts), int(limits.max()))
        responses, logprobs = torch.full(shape, pad_id), torch.zeros(shape)
        for row, (new, new_logprobs) in enumerate(answers):
            responses[row, : len(new)] = torch.tensor(new)
            logprobs[row, : len(new)] = torch.tensor(new_logprobs)
        return finish(
            prompts, responses, logprobs, sampling=sampling, pad_id=pad_id, decode=self.tokenizer.decode
        ).trimmed()
