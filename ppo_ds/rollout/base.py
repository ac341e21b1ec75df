"""Interface of the decode backends, and where responses end: limits, stop tokens and stop strings."""

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
    """All options of sampling, so that no default of a model's generation config applies."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float  # 1.0 = off
    top_k: int  # 0 = off, 1 = greedy
    stop_token_ids: tuple[int, ...]  # () = never stop early
    stop_strings: tuple[str, ...]

    def as_greedy(self) -> SamplingParams:
        """Returns a copy that always takes the most likely token."""
        return replace(self, top_k=1)


class Generator(Protocol):
    """Decode backend: continues prompts with the current policy, inside the actor's generation mode.

    A backend of the table DECODE_BACKENDS is made with the keyword arguments

    lm              returns the model to decode with, called inside generation mode only: a transformers model
        that holds the current weights, adapters included. With ZeRO-3 it is an inference copy, or the sharded
        model itself, whose layers are gathered in each forward (engine/hybrid.py)
    tokenizer       gives pad_id and decode(ids, skip_special_tokens=)
    token_budget    maximum number of tokens (prompts and responses, padding counted) decoded at a time
    all_reduce_max  returns the largest of the ranks' numbers, or None. With it the ranks hold the model
        together, and every rank must run the same number of forwards
    should_stop     returns whether the responses are no longer needed. Once it does, the backend ends within
        a few tokens and returns a Rollout with arbitrary tokens, which the caller discards. It does not
        raise, since other ranks may already have all of their responses
    """

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        """Returns one response per prompt, in the order of the prompts, all tensors on the CPU.

        ``truncate_at_stop`` turns raw tokens [B,R] and their log-probs [B,R] into the Rollout: it applies the
        limits, stop tokens and stop strings. The log-probs are those of the whole distribution at
        ``sampling.temperature``, whatever top_k and top_p are. Every rank calls the backend equally often,
        each with its own prompts. A long call counts its progress with ``distributed.heartbeat.beat``.
        """


def max_new_tokens(prompts: Prompts, sampling: SamplingParams) -> Tensor:
    """Returns the maximum number of new tokens of each row [B].

    It is the lower one of the row's own limit and that of ``sampling``, and takes precedence over
    ``min_new_tokens``.
    """
    return prompts.limits.clamp(max=sampling.max_new_tokens)


class StopStrings:
    """Finds stop strings in the decoded text of token ids."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self.strings = strings
        self.decode = decode
        # The number of last tokens to search during decoding. A token has at least one byte, so a stop string
        # that has just become complete has at most as many tokens as bytes. 4 more, since some tokenizers
        # drop a space where a text begins. ``prefix_length`` finds stop strings that this window misses.
        self.window = max((len(string.encode()) for string in strings), default=0) + 4

    def found_in(self, ids: Sequence[int]) -> bool:
        """Returns whether the text of ``ids`` contains a stop string."""
        text = self.decode(ids)
        return any(string in text for string in self.strings)

    def prefix_length(self, ids: Sequence[int]) -> int:
        """Returns the length of the shortest prefix with a stop string, or len(ids) + 1 without one.

        A prefix with a stop string has it in all longer prefixes too, so the length is found by bisection.
        """
        if not self.found_in(ids):
            return len(ids) + 1
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.found_in(ids[:middle]) else (middle + 1, high)
        return low


def truncate_at_stop(
    prompts: Prompts,
    responses: Tensor,
    logprobs: Tensor,
    *,
    sampling: SamplingParams,
    pad_id: int,
    decode: Callable[[Sequence[int]], str],
) -> Rollout:
    """Truncates raw continuations at their first stop or at their limit.

    responses [B,R] long and logprobs [B,R] fp32 may hold anything after the end of a response. Masks come
    from stop positions, never from ``ids != pad``: an end token inside a chat prompt, or one that is also the
    pad token, stays as it is. A stop at the last position within the limit counts; later ones do not.
    """
    limits = max_new_tokens(prompts, sampling)
    ends = limits.clamp(max=responses.shape[1]).to(responses.device)
    complete = torch.zeros_like(ends, dtype=torch.bool)
    if sampling.stop_strings:
        find = StopStrings(sampling.stop_strings, decode).prefix_length
        stops = torch.tensor([find(row.tolist()) for row in responses], device=ends.device)
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
