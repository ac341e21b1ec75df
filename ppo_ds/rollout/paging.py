"""transformers' continuous batching: a KV cache in pages, and waiting rows that take the places of finished ones.

It keeps temperature, end tokens, a limit for each row and the log-probs of the drawn tokens. It has no stop strings and no least number of
tokens, and its log-probs are those of what top_k and top_p leave, so rollout/paged.py refuses these. Attention without a flash kernel
computes every row's queries against every row's keys: right, and slow; actor.model.attn_implementation=flash_attention_2 avoids it.
Tried on CPUs; not tried on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.heartbeat import sign

PAGE_TOKENS = 256  # the smallest page that flash attention's paged kernels take
FORWARD_TOKENS = 2048  # of one forward: longer prompts go in pieces, and what attention masks take (this times the cache) stays small
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
LAYERS = {"full_attention", "sliding_attention"}


def can_page(lm: nn.Module) -> str | None:
    """Why ``lm``, whose weights must be whole, cannot decode this way; None where it can."""
    if "auto_switch_to_flash" not in {f.name for f in fields(ContinuousBatchingConfig)}:
        return f"transformers {transformers.__version__} is too old for it (5.23 is what was tried)"
    family, config = type(lm).__name__, getattr(lm, "config", None)
    if not hasattr(lm, "init_continuous_batching") or not getattr(lm, "_supports_attention_backend", False):
        return f"{family} has no continuous batching in transformers"
    if config._attn_implementation not in ATTENTIONS:
        return f"it needs actor.model.attn_implementation among {', '.join(ATTENTIONS)}, not {config._attn_implementation}"
    others = set(getattr(config.get_text_config(), "layer_types", None) or ()) - LAYERS
    if others:
        return f"{family} has layers that it has no pages for ({', '.join(sorted(others))})"
    return None


def generate_paged(
    lm: Any,
    prompts: Sequence[list[int]],
    limits: Sequence[int],
    *,
    temperature: float,
    greedy: bool,
    stop_token_ids: tuple[int, ...],
    pad_id: int,
    cache_tokens: int,
    stopped: Callable[[], bool],
) -> list[tuple[list[int], list[float]]]:
    """Token ids of each prompt and the most new tokens of each -> (answer, log-probs) of each, stop token included.

    Log-probs are those of the whole distribution at ``temperature``. ``cache_tokens``: how many tokens the cache holds, more only where a
    single row needs it. All prompts are handed over before the first forward and the seed is drawn from this process's own generator, which
    is then put back: the same state gives the same answers, whatever the timing of the thread that transformers starts (ended on return).
    Once it is ``stopped``, answers that are not there yet are empty.
    """
    seed = 0 if greedy else int(torch.randint(2**31 - 1, ()))
    config = GenerationConfig(
        do_sample=True,  # with it the temperature comes in; see below
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        max_new_tokens=max(limits),
        eos_token_id=list(stop_token_ids) or -1,  # -1: none
        pad_token_id=pad_id,
    )
    on_gpu = [lm.device] if lm.device.type == "cuda" else []
    if on_gpu:
        torch.cuda.empty_cache()  # transformers counts what torch holds in reserve as taken
    with torch.random.fork_rng(devices=on_gpu):
        manager = lm.init_continuous_batching(
            config, paged_config([len(p) for p in prompts], limits, cache_tokens, seed)
        )
        config.do_sample = (
            not greedy
        )  # read at the start: the likeliest token then, its log-prob still at the temperature
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            manager.add_request(prompt, request_id=str(row), max_new_tokens=limit)
        answers = _answers(manager, len(prompts), stopped)
    return [answers.get(str(row), ([], [])) for row in range(len(prompts))]


def paged_config(
    lengths: Sequence[int], limits: Sequence[int], cache_tokens: int, seed: int
) -> ContinuousBatchingConfig:
    """As many pages as ``cache_tokens`` are, but one row's at least and no more than all rows can fill."""
    pages = [math.ceil((length + limit) / PAGE_TOKENS) for length, limit in zip(lengths, limits, strict=True)]
    held = min(max(cache_tokens // PAGE_TOKENS, *pages), sum(pages))
    return ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=held,
        max_batch_tokens=FORWARD_TOKENS,
        safety_margin=0.0
        if held == sum(pages)
        else None,  # pages kept free for rows to grow into: not needed where all rows fit
        return_logprobs=True,
        seed=seed,
        auto_switch_to_flash=False,  # attention is actor.model.attn_implementation's to say
    )


def _answers(
    manager: Any, count: int, stopped: Callable[[], bool]
) -> dict[str, tuple[list[int], list[float]]]:
    """Runs the manager until ``count`` answers are there, by request id, or it is ``stopped``. On return its thread has ended, its cache is freed."""
    answers: dict[str, tuple[list[int], list[float]]] = {}
    failed: list[str] = []
    manager.start()
    try:
        while len(answers) < count and not failed and not stopped() and manager.is_running():
            fault("generate.step")
            output = manager.get_result(timeout=1)
            if output is not None and output.error is not None:
                failed.append(output.error)
            elif output is not None:
                answers[output.request_id] = output.generated_tokens, output.logprobs
                sign()
    finally:
        manager.stop(block=True, hard_stop=True)
        manager.destroy()
    fatal = manager.background_thread_status.fatal_error
    if fatal is not None:
        fatal.add_note("in transformers' continuous batching; its cache holds memory.rollout_tokens tokens")
        raise fatal
    if len(answers) < count and not stopped():
        reason = "; ".join(failed) or "no reason given"
        raise RuntimeError(
            f"transformers' continuous batching ended with {len(answers)} of {count} answers: {reason}"
        )
    return answers
