"""Generation of one response whose text can be read while it is generated, with transformers' streamer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rollout.base import SamplingParams, StopStrings
from ppo_ds.rollout.hf import StopStringCriteria, generation_config


class StreamedResponse:
    """A response that another thread generates while iteration yields its text in pieces.

    The pieces lack special tokens. The streamer holds back an incomplete word or character, so after an early
    end ``ids`` may hold a little more than the pieces did.
    """

    def __init__(self, lm: nn.Module, prompt: list[int], sampling: SamplingParams, tokenizer: Tokenizer):
        """Starts the generation with ``sampling``, which uses torch's global random numbers."""
        self.ids: list[int] = []  # tokens of the response, complete after ``join``
        self._lm, self._prompt, self._sampling, self._tokenizer = lm, prompt, sampling, tokenizer
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._streamer = TextIteratorStreamer(
            tokenizer.hf, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[str]:
        yield from self._streamer

    def stop(self) -> None:
        """Ends the generation with the next token and waits for it; further interrupts are ignored."""
        self._stopped.set()
        while self._thread.is_alive():
            with suppress(KeyboardInterrupt):
                self._thread.join()

    def join(self) -> None:
        """Waits for the end of the generation and raises the exception that ended it, if any."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _generate(self) -> None:
        try:
            device = next(self._lm.parameters()).device
            ids, width = torch.tensor([self._prompt], device=device), len(self._prompt)
            criteria: list[StoppingCriteria] = [_Stopped(self._stopped)]
            if self._sampling.stop_strings:
                stops = StopStrings(self._sampling.stop_strings, self._tokenizer)
                criteria.append(StopStringCriteria(width, stops))
            pad_id, limit = self._tokenizer.pad_id, self._sampling.max_new_tokens
            with torch.no_grad():
                sequences = self._lm.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=generation_config(self._sampling, limit, pad_id),
                    stopping_criteria=StoppingCriteriaList(criteria),
                    streamer=self._streamer,
                )
            self.ids = sequences[0, width:].tolist()
        except BaseException as error:  # raised again in the thread that joins
            self._error = error
            self._streamer.on_finalized_text("", stream_end=True)  # otherwise the reader would wait forever


class _Stopped(StoppingCriteria):
    """Ends the generation once an event is set."""

    def __init__(self, event: threading.Event):
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return torch.full((len(input_ids),), self._event.is_set(), device=input_ids.device)
