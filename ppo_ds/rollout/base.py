"""What a decode backend is, and what all of them share: where an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ppo_ds.ops.sequences import response_mask
from ppo_ds.types import Prompts, Rollout


@dataclass(frozen=True)
class SamplingParams:
    """Every knob of the sampler, said in full: nothing is left for a model's own generation config to fill in."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float  # 1.0 = off
    top_k: int  # 0 = off, 1 = greedy
    stop_token_ids: tuple[int, ...]  # () = never stop early
    stop_strings: tuple[str, ...]

    def as_greedy(self) -> SamplingParams:
        """The same, always taking the likeliest token."""
        return replace(self, top_k=1)


class Generator(Protocol):
    """Continues prompts with the current policy, inside the actor's generation mode.

    All take ``stopped``. Once it is true they end within a few tokens, and what they return is a Rollout by its shape alone: whoever asked for it
    must look whether it was ``stopped`` meanwhile, and throw it away. They raise nothing, since other ranks may have all of their answers by then.
    """

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout: ...


def never() -> bool:
    """Nobody stops it."""
    return False


def limits_of(prompts: Prompts, sampling: SamplingParams) -> Tensor:
    """[B] long: the most new tokens of each answer, by its row and by the sampler. It wins over ``min_new_tokens``."""
    return prompts.limits.clamp(max=sampling.max_new_tokens)


def finish(
    prompts: Prompts,
    responses: Tensor,
    logprobs: Tensor,
    *,
    sampling: SamplingParams,
    pad_id: int,
    decode: Callable[[Sequence[int]], str],
) -> Rollout:
    """Cut raw continuations at their first stop, or at their limit.

    responses [B,R] long and logprobs [B,R] fp32 as a backend made them, rubbish allowed after the end of an answer. Masks come from
    stop positions, never from ``ids != pad``: an end token inside a chat prompt, or one that is also the pad token, stays what it is.
    A stop in the last place that the limit allows is a stop; a later one was never answered.
    """
    limits = limits_of(prompts, sampling)
    ends = limits.clamp(max=responses.shape[1]).to(responses.device)
    complete = torch.zeros_like(ends, dtype=torch.bool)
    if sampling.stop_strings:
        stops = torch.tensor(
            [stop_string_length(row.tolist(), sampling.stop_strings, decode) for row in responses],
            device=ends.device,
        )
        complete, ends = stops <= ends, torch.minimum(stops, ends)
    mask, _, finished = response_mask(responses, sampling.stop_token_ids, lengths=ends)
    return Rollout(
        ids=torch.cat([prompts.ids, responses.masked_fill(~mask, pad_id)], dim=1),
        attention_mask=torch.cat([prompts.mask, mask], dim=1),
        response_mask=mask,
        finished=finished | complete,
        limits=limits,
        logprobs=logprobs.masked_fill(~mask, 0.0),
        metadata=prompts.metadata,
    )


def stop_string_length(ids: list[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int:
    """The number of leading tokens after which a stop string is first complete; len(ids) + 1 where there is none.

    Decoding a longer prefix never loses a stop string, so the first such prefix can be bisected.
    """

    def complete(n: int) -> bool:
        text = decode(ids[:n])
        return any(stop in text for stop in stops)

    if not complete(len(ids)):
        return len(ids) + 1
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if complete(middle) else (middle + 1, high)
    return low
