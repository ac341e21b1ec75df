"""Interface of decode backends, and truncation of responses at limits, stop tokens and stop strings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ppo_ds.ops.sequences import response_mask
from ppo_ds.types import Prompts, Rollout, to_device


@dataclass(frozen=True)
class SamplingParams:
    """All sampling options, so that no default of a model's generation config applies."""

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


@dataclass(frozen=True)
class Continuation:
    """Responses in progress, one per prompt, and the condition that ends generation (rollout.partial)."""

    begun: Sequence[Sequence[int]]  # tokens that each response already has, fewer than its limit
    # receives the rows whose responses have ended; returns whether to interrupt the others
    enough: Callable[[Set[int]], bool]


class Generator(Protocol):
    """Decode backend: continues prompts with the current policy, inside the actor's generation mode.

    The classes in rollout/keys.py are constructed with these keyword arguments:

    lm            function that returns the transformers model to decode with; each call of the backend must
        call it. The model can run forwards, but its weights cannot be read or saved: they may be sharded, and
        LoRA adapters may be merged or separate layers (engine/hybrid.py). run/export.py writes weights
    tokenizer     has pad_id and decode(ids, skip_special_tokens=)
    token_budget  maximum number of tokens (prompts and responses, with padding) decoded at a time
    lockstep_max  None, or a collective that returns the maximum of a number over all ranks. It is given if
        all ranks must run the same number of forwards of the model (ZeRO-3 layer by layer)
    should_stop   function that returns whether the responses are no longer needed. Once it returns True, the
        backend ends within a few tokens and returns a Rollout with arbitrary tokens, which the caller
        discards. The backend does not raise, since other ranks may already have all of their responses

    A backend with ``own_weights`` calls ``lm`` only when it is constructed, inside the generation mode, to
    read the config and the weight names of the model. Its method ``loaded(weights)`` is a context manager
    that receives the weights at each switch to generation (``HybridActor.connect``). Further arguments:

    settings      the section rollout.vllm of the config
    kv_cache      bytes of the key-value cache of this rank
    longest       number of tokens of the longest sequence
    temperature   sampling temperature of all calls that need log-probs
    group         None, or the Subgroup of ranks that share one copy of the weights

    The weights may differ from call to call. At start-up, before a checkpoint is loaded, the parity check
    compares the log-probs of the backend with those of training (ppo/health.py). The collection of rollouts
    calls the backend with the weights of the last step, and an evaluation may call it with averaged weights
    (actor.ema.evaluate).
    """

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        """Returns one response per prompt, in the order of the prompts, trimmed and on the CPU.

        ``truncate_at_stop`` makes the Rollout from generated tokens [B,R] and their log-probs [B,R]: it
        applies the limits, stop tokens and stop strings. The log-probs are computed from the full
        distribution at ``sampling.temperature``, regardless of top_k and top_p. Rows with ``prompts.seeds``
        are sampled with their seeds instead of torch's random state, except by hf. All ranks must call the
        backend equally often, each with its prompts. The backend calls ``distributed.heartbeat.beat`` in the
        main thread whenever it has generated tokens; a call without progress would hide a hang.
        """


class PartialGenerator(Generator, Protocol):
    """Decode backend that can also continue responses, and interrupt them (rollout.partial)."""

    def __call__(
        self, prompts: Prompts, sampling: SamplingParams, continuation: Continuation | None = None
    ) -> Rollout:
        """Returns the whole response to each prompt, or the tokens so far of an interrupted response.

        The KV cache of the tokens in ``continuation.begun`` is computed with the current weights. Limits,
        min_new_tokens and stop strings include these tokens. Their log-probs are not computed and are 0 in
        the Rollout. A response that was not started has no tokens. Rows are started in order.
        """


@dataclass
class DecodeBackend:
    """Base class of this package's decode backends; ``Generator`` describes its fields."""

    lm: Callable[[], nn.Module]
    _: KW_ONLY
    tokenizer: Any
    token_budget: int
    lockstep_max: Callable[[int], int] | None = None
    should_stop: Callable[[], bool] = lambda: False


def max_new_tokens(prompts: Prompts, sampling: SamplingParams) -> Tensor:
    """Returns the maximum number of new tokens of each row [B].

    This is the minimum of the row's limit and ``sampling.max_new_tokens``; it overrides ``min_new_tokens``.
    """
    return prompts.limits.clamp(max=sampling.max_new_tokens)


def draw_uniforms(prompts: Prompts, limits: Tensor, device: torch.device) -> Tensor:
    """Draws numbers [B,R] float64 in [0,1); with seeds, a row's numbers do not depend on the other rows."""
    shape = (len(prompts), int(limits.max()))
    if prompts.seeds is None:
        return torch.rand(*shape, dtype=torch.float64, device=device)
    uniforms = torch.zeros(shape, dtype=torch.float64)
    for row, seed, limit in zip(uniforms, prompts.seeds.tolist(), limits.tolist(), strict=True):
        generator = torch.Generator().manual_seed(seed)
        row[:limit] = torch.rand(limit, generator=generator, dtype=torch.float64)
    return to_device(uniforms, device)


class StopStrings:
    """Finds stop strings in the decoded text of token ids."""

    def __init__(self, strings: Sequence[str], tokenizer: Any):
        self.strings = strings
        self.tokenizer = tokenizer
        # Number of last tokens that are searched during decoding. A token has at least one byte, so a stop
        # string has at most as many tokens as bytes. The window has 4 more tokens, since some tokenizers drop
        # a space at the beginning of a text. ``prefix_length`` finds stop strings that this window misses.
        self.window = max((len(string.encode()) for string in strings), default=0) + 4

    def found_in(self, ids: Sequence[int]) -> bool:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)  # a stop string may be a special token
        return any(string in text for string in self.strings)

    def prefix_length(self, ids: Sequence[int]) -> int:
        """Returns the length of the shortest prefix that contains a stop string, or len(ids) + 1 without one.

        Longer prefixes contain the stop strings of shorter ones, so the length is found by bisection.
        """
        if not self.found_in(ids):
            return len(ids) + 1
        return bisect_left(range(len(ids)), True, lo=1, key=lambda length: self.found_in(ids[:length]))


def truncate_at_stop(
    prompts: Prompts,
    responses: Tensor,
    logprobs: Tensor,
    *,
    sampling: SamplingParams,
    tokenizer: Any,
    lengths: Tensor | None = None,
) -> Rollout:
    """Builds a Rollout from generated tokens, each row truncated at its first stop, limit or length.

    Masks are computed from these ends, never from ``ids != pad``, so they keep an end token inside a chat
    prompt, and an end token that is also the pad token. A row with a stop at its limit is ``finished``.

    Args:
        responses: Generated tokens [B,R] long, including stop tokens and the tokens of stop strings.
            Positions after the end of a row may hold any ids.
        logprobs: Log-probs [B,R] fp32 of these tokens; positions after the end of a row may hold any values.
        lengths: Number of generated tokens of each row [B] long. A row that is shorter than its limit and
            contains no stop (it was interrupted) is truncated at its length and is not ``finished``. None is
            allowed only if every row holds generated tokens up to its first stop or its limit; otherwise
            padding before that point would be trained as response tokens.
    """
    limits = max_new_tokens(prompts, sampling)
    ends = limits.clamp(max=responses.shape[1]).to(responses.device)
    if lengths is not None:
        ends = torch.minimum(ends, lengths.to(ends.device))
    complete = torch.zeros_like(ends, dtype=torch.bool)
    if sampling.stop_strings:
        find = StopStrings(sampling.stop_strings, tokenizer).prefix_length
        rows = zip(responses.tolist(), ends.tolist(), strict=True)
        stops = torch.tensor([find(row[:end]) for row, end in rows], device=ends.device)
        complete, ends = stops <= ends, torch.minimum(stops, ends)
    mask, _, finished = response_mask(responses, sampling.stop_token_ids, lengths=ends)
    return Rollout(
        ids=torch.cat([prompts.ids, responses.masked_fill(~mask, tokenizer.pad_id)], dim=1),
        attention_mask=torch.cat([prompts.mask, mask], dim=1),
        response_mask=mask,
        finished=finished | complete,
        limits=limits,
        logprobs=logprobs.masked_fill(~mask, 0.0),
        metadata=prompts.metadata,
    )
