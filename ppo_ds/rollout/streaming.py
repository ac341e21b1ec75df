"""Generates a response and shows its text during generation, with transformers' streamer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteriaList, TextStreamer

from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rollout.base import SamplingParams, StopStrings
from ppo_ds.rollout.hf import StopStringCriteria, generation_config


class Streamer(TextStreamer):
    """Collects the tokens of a response and shows the text word by word, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, show: Callable[[str], None]):
        super().__init__(
            tokenizer.hf, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self.ids: list[int] = []
        self.shown = ""
        self._show = show

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.shown += text
        self._show(text)


@torch.no_grad()
def stream_response(
    lm: nn.Module,
    prompt: list[int],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    show: Callable[[str], None],
) -> tuple[list[int], bool]:
    """Generates a response with torch's global random numbers; ``show`` receives pieces of its text.

    Returns the tokens, and whether an interrupt (Ctrl-C) ended the response.
    """
    stops = StopStrings(sampling.stop_strings, tokenizer)
    criteria = [StopStringCriteria(len(prompt), stops)] if sampling.stop_strings else []
    ids = torch.tensor([prompt], device=next(lm.parameters()).device)
    streamer, interrupted = Streamer(tokenizer, show), False
    try:
        lm.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation_config(sampling, sampling.max_new_tokens, tokenizer.pad_id),
            stopping_criteria=StoppingCriteriaList(criteria),
            streamer=streamer,
        )
    except KeyboardInterrupt:
        interrupted = True
    answer = tokenizer.decode(streamer.ids)
    if answer.startswith(streamer.shown):  # after an interrupt, the last word is not shown yet
        show(answer[len(streamer.shown) :])
    return streamer.ids, interrupted
