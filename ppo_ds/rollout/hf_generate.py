"""transformers' ``generate`` with every field said and the log-probs of the drawn tokens taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import beat
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

    def finished(self, answers: Tensor) -> Tensor:
        """[B,R] for the answers [B,R] that came out. A step that generate() took and undid again has left its logits pending."""
        if len(self.logprobs) < answers.shape[1]:
            self.take(answers[:, -1])
        return torch.stack(self.logprobs, dim=1)


class _StopStrings(StoppingCriteria):
    """Ends rows whose answer, as text, holds a stop string.

    transformers' own also matches text that began in the prompt and reads tokens in other ways than decoding does: a row that it alone
    takes for ended would be filled up with padding that nobody can tell from an answer.
    """

    def __init__(self, prompt_width: int, stops: Sequence[str], decode: Callable[[list[int]], str]):
        self.prompt_width = prompt_width
        self.stops = stops
        self.decode = decode
        # a token is a byte at least; a few more, since some tokenizers drop a space where a text begins. What is overlooked is cut later.
        self.window = max(len(stop.encode()) for stop in stops) + 4
        self.ended: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if self.ended is None:
            self.ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        running = (~self.ended).nonzero().flatten()
        tails = input_ids[running, self.prompt_width :][:, -self.window :].tolist()
        hits = [any(stop in text for stop in self.stops) for text in map(self.decode, tails)]
        self.ended[running] = torch.tensor(hits, dtype=torch.bool, device=input_ids.device)
        return self.ended


class _RowLimits(StoppingCriteria):
    """Ends each row at its own limit, so that decoding ends with the last row that still may go on."""

    def __init__(self, prompt_width: int, limits: Tensor):
        self.ends = prompt_width + limits  # [B], where the ids are

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return self.ends <= input_ids.shape[1]


class _Stopped(StoppingCriteria):
    """Ends all rows once nobody wants them. Asks the host alone."""

    def __init__(self, stopped: Callable[[], bool]):
        self.stopped = stopped

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        fault("generate.step")
        beat()
        return torch.full((len(input_ids),), self.stopped(), device=input_ids.device)


@torch.no_grad()
def generate(
    lm: nn.Module,
    ids: Tensor,
    mask: Tensor,
    limits: Tensor,
    *,
    min_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop_token_ids: tuple[int, ...],
    stop_strings: tuple[str, ...],
    pad_id: int,
    decode: Callable[[list[int]], str],
    in_step: bool = False,
    stopped: Callable[[], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Left-padded ids, mask [B,P] and the most new tokens of each row [B] -> responses [B,R] long and log-probs [B,R] fp32, R <= limits.max().

    Log-probs are those of the whole distribution at ``temperature``, also where top_k or top_p narrow the draw. Places after an
    answer's end or a row's limit hold rubbish. A limit wins over ``min_new_tokens``. ``decode`` (ids to text) is what stop strings are looked for in.
    ``in_step``: run forwards until the last rank is done, for a model that the ranks hold together.
    ``stopped``: once it is true this ends with the next token (in step: once it is true on all ranks), whatever the answers are by then.
    """
    recorder = _Recorder(temperature)
    processors = LogitsProcessorList([recorder])
    if min_new_tokens and stop_token_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                ids.shape[1], min_new_tokens, list(stop_token_ids), device=ids.device
            )
        )
    greedy = top_k == 1
    warpers = {} if greedy else {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    config = GenerationConfig(
        do_sample=not greedy,
        max_new_tokens=int(limits.max()),
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=pad_id,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        **warpers,
    )
    ends: list[StoppingCriteria] = (
        [_RowLimits(ids.shape[1], limits.to(ids.device))] if limits.min() < limits.max() else []
    )
    if stopped is not None:
        ends.append(_Stopped(stopped))
    if stop_strings:
        ends.append(_StopStrings(ids.shape[1], stop_strings, decode))
    sequences = lm.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        generation_config=config,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList(ends),
        synced_gpus=in_step,
    )
    answers = sequences[:, ids.shape[1] :]
    return answers, recorder.finished(answers)
