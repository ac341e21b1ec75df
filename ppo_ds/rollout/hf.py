"""Decode backend on transformers' ``generate``, which supports every causal LM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

from ppo_ds.compute.batching import plan_microbatches
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import beat, counting
from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits
from ppo_ds.rollout.base import DecodeBackend, SamplingParams, StopStrings, max_new_tokens, truncate_at_stop
from ppo_ds.types import Prompts, Rollout, to_device


class HFGenerator(DecodeBackend):
    """Decodes prompts in chunks of at most ``token_budget`` tokens (prompts and responses with padding).

    The arguments are described in ``Generator``; ``should_stop`` is called at every token.
    """

    def __call__(self, prompts: Prompts, sampling: SamplingParams) -> Rollout:
        lm = self.lm()
        device = next(lm.parameters()).device
        lengths, limits = prompts.mask.sum(1), max_new_tokens(prompts, sampling)
        shape = (len(prompts), int(limits.max()))
        responses, logprobs = torch.full(shape, self.tokenizer.pad_id), torch.zeros(shape)
        # longest rows first, so that rows of similar length share a chunk
        chunks = plan_microbatches(lengths, limits, self.token_budget)
        if self.lockstep_max is not None:
            most = self.lockstep_max(len(chunks))
            chunks = plan_microbatches(lengths, limits, self.token_budget, at_least=most)
        with counting(len(chunks), "chunks") as done:
            for number, rows in enumerate(chunks, start=1):
                # ranks in lockstep stop together, as soon as one rank has to stop
                if (self.lockstep_max or int)(self.should_stop()):
                    break
                chunk, longest = prompts.select(rows), int(lengths[rows].max())
                new, new_logprobs = generate(
                    lm,
                    to_device(chunk.ids[:, -longest:], device),
                    to_device(chunk.mask[:, -longest:], device),
                    limits[rows],
                    sampling,
                    tokenizer=self.tokenizer,
                    lockstep=self.lockstep_max is not None,
                    should_stop=self.should_stop,
                )
                responses[rows, : new.shape[1]] = new.cpu()
                logprobs[rows, : new.shape[1]] = new_logprobs.cpu()
                done(number)
        return truncate_at_stop(
            prompts, responses, logprobs, sampling=sampling, tokenizer=self.tokenizer
        ).trimmed()


@torch.no_grad()
def generate(
    lm: nn.Module,
    ids: Tensor,
    mask: Tensor,
    limits: Tensor,
    sampling: SamplingParams,
    *,
    tokenizer: Any,
    lockstep: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Calls transformers' ``generate`` and returns responses [B,R] long and their log-probs [B,R] fp32.

    ids and mask [B,P] are left-padded. R is at most limits.max(); tokens after the end of a response are
    arbitrary. Log-probs are those of the full distribution at the temperature, regardless of top_k and top_p.

    Args:
        limits: Maximum number of new tokens of each row [B]. It takes precedence over ``min_new_tokens``.
        lockstep: Whether to run forwards until all ranks are done, as a sharded model requires.
        should_stop: Function; once it returns True (with ``lockstep``: on all ranks), generation ends with
            the next token, even if responses are incomplete.
    """
    width = ids.shape[1]
    recorder = LogprobRecorder(sampling.temperature)
    processors = LogitsProcessorList([recorder])
    stop_ids = list(sampling.stop_token_ids)
    if sampling.min_new_tokens and stop_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(width, sampling.min_new_tokens, stop_ids, device=ids.device)
        )
    criteria: list[StoppingCriteria] = []
    if limits.min() < limits.max():
        criteria.append(_RowLimits(width, to_device(limits, ids.device)))
    if sampling.stop_strings:
        criteria.append(StopStringCriteria(width, StopStrings(sampling.stop_strings, tokenizer)))
    longest = int(limits.max())
    with counting(longest, "tokens per response") as done:
        if should_stop is not None:
            criteria.append(_ShouldStop(should_stop, done))
        sequences = lm.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            generation_config=generation_config(sampling, longest, tokenizer.pad_id),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList(criteria),
            synced_gpus=lockstep,
        )
    responses = sequences[:, width:]
    return responses, recorder.stacked(responses)


def generation_config(sampling: SamplingParams, max_new_tokens: int, pad_id: int) -> GenerationConfig:
    """Returns a config that sets every option with an effect on responses, so that no default applies."""
    greedy = sampling.top_k == 1
    warpers = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return GenerationConfig(
        do_sample=not greedy,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=pad_id,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        **({} if greedy else warpers),
    )


class LogprobRecorder(LogitsProcessor):
    """Records the log-prob of each sampled token from the raw logits, before any warper changes them.

    The token drawn at step t is known at step t + 1, so only the logits [B,V] of one step are kept at a time.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.pending: Tensor | None = None
        self.logprobs: list[Tensor] = []

    def take(self, tokens: Tensor) -> None:
        """Records the log-probs of tokens [B] that were sampled from the pending logits."""
        if self.pending is not None:
            logprobs, _ = logprobs_and_entropy_from_logits(
                self.pending, tokens, self.temperature, with_entropy=False
            )
            self.logprobs.append(logprobs)
        self.pending = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.take(input_ids[:, -1])
        self.pending = scores.clone()
        return scores

    def stacked(self, responses: Tensor) -> Tensor:
        """Returns the log-probs [B,R] of the responses [B,R].

        If generate() discarded its last step, the logits of that step are not used.
        """
        if len(self.logprobs) < responses.shape[1]:
            self.take(responses[:, -1])
        return torch.stack(self.logprobs, dim=1)


@dataclass(eq=False)
class StopStringCriteria(StoppingCriteria):
    """Ends rows whose decoded response contains a stop string.

    The criterion of transformers also matches text that begins in the prompt, and decodes tokens differently.
    If only that criterion ended a row, the row would be filled with padding that looks like response tokens.
    """

    prompt_width: int
    stops: StopStrings
    ended: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        if self.ended is None:
            self.ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        running = (~self.ended).nonzero().flatten()
        tails = input_ids[running, self.prompt_width :][:, -self.stops.window :].tolist()
        hits = [self.stops.found_in(tail) for tail in tails]
        self.ended[running] = torch.tensor(hits, dtype=torch.bool, device=input_ids.device)
        return self.ended


class _RowLimits(StoppingCriteria):
    """Ends each row at the row's limit, so that decoding ends once all rows have ended."""

    def __init__(self, prompt_width: int, limits: Tensor):
        self.ends = prompt_width + limits  # [B] on the device of the ids

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return self.ends <= input_ids.shape[1]


@dataclass(eq=False)
class _ShouldStop(StoppingCriteria):
    """Ends all rows once the responses are no longer needed. The check does not wait for the device.

    ``done`` receives the number of tokens of the longest response so far.
    """

    should_stop: Callable[[], bool]
    done: Callable[[int], None]
    tokens: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        fault("generate.step")
        beat()
        self.tokens += 1
        self.done(self.tokens)
        return torch.full((len(input_ids),), self.should_stop(), device=input_ids.device)
