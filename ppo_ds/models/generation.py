"""transformers' ``generate`` with every field said and the log-probs of the drawn tokens taken on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MinNewTokensLengthLogitsProcessor

from ppo_ds.ops.logprobs import logprobs_from_logits


class _Recorder(LogitsProcessor):
    """Sees the raw logits of every step before anything warps them, and keeps of each only the drawn token's log-prob.

    The token drawn from step t's logits is known at step t + 1, so one step's logits [B,V] are held, never all of a rollout.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.pending: Tensor | None = None
        self.logprobs: list[Tensor] = []

    def take(self, tokens: Tensor) -> None:
        if self.pending is not None:
            self.logprobs.append(logprobs_from_logits(self.pending, tokens, self.temperature))
        self.pending = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.take(input_ids[:, -1])
        self.pending = scores.clone()
        return scores


@torch.no_grad()
def generate(
    lm: nn.Module,
    ids: Tensor,
    mask: Tensor,
    *,
    max_new_tokens: int,
    min_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop_token_ids: tuple[int, ...],
    stop_strings: tuple[str, ...],
    pad_id: int,
    tokenizer: Any,
) -> tuple[Tensor, Tensor]:
    """Left-padded ids, mask [B,P] -> responses [B,R] long and log-probs [B,R] fp32, R <= max_new_tokens.

    Log-probs are those of the whole distribution at ``temperature``, also where top_k or top_p narrow the draw. Places after an
    answer's end hold rubbish. ``tokenizer`` (transformers') is needed for stop strings only.
    """
    recorder = _Recorder(temperature)
    processors = LogitsProcessorList([recorder])
    if min_new_tokens and stop_token_ids:
        processors.append(MinNewTokensLengthLogitsProcessor(ids.shape[1], min_new_tokens, list(stop_token_ids), device=ids.device))
    greedy = top_k == 1
    warpers = {} if greedy else {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    config = GenerationConfig(
        do_sample=not greedy,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=pad_id,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        stop_strings=list(stop_strings) or None,
        **warpers,
    )
    extra = {"tokenizer": tokenizer} if stop_strings else {}
    sequences = lm.generate(input_ids=ids, attention_mask=mask.long(), generation_config=config, logits_processor=processors, **extra)
    recorder.take(sequences[:, -1])
    return sequences[:, ids.shape[1] :], torch.stack(recorder.logprobs, dim=1)
