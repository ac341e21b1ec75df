"""What an experience says about the run, as numbers. Every rank holds all rows, so nothing here is a collective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.kl import approx_kl
from ppo_ds.ops.masked import masked_mean
from ppo_ds.types import Experience, Metrics


def describe(experience: Experience, *, kl_coef: float, samples_per_prompt: int) -> Metrics:
    """reward/*, kl/*, parity/*, value/* and rollout/* of METRICS: before the update, masked, over all ranks."""
    scores, lengths = experience.scores.double(), experience.response_lengths
    places = experience.attention_mask.numel()
    numbers = {
        "reward/score_mean": scores.mean(),
        "reward/score_std": scores.std(unbiased=False),
        "reward/score_min": scores.min(),
        "reward/score_max": scores.max(),
        "reward/missing_eos_frac": (~experience.finished).double().mean(),
        "rollout/prompt_len_mean": experience.prompt_lengths.double().mean(),
        "rollout/resp_len_mean": lengths.double().mean(),
        "rollout/resp_len_max": lengths.max(),
        "rollout/stop_frac": experience.finished.double().mean(),
        "rollout/truncated_frac": (~experience.finished).double().mean(),
        "rollout/empty_frac": (lengths <= experience.finished)
        .double()
        .mean(),  # an end token at once, or nothing
        "rollout/pad_frac": 1 - experience.attention_mask.sum() / places,
        "rollout/unique_frac": _unique(experience) / len(experience),
    }
    if samples_per_prompt > 1:  # one answer alone has no spread
        numbers["rollout/zero_std_group_frac"] = (
            (scores.view(-1, samples_per_prompt).std(1, unbiased=False) == 0).double().mean()
        )
    if experience.logprobs is not None:
        numbers |= _parity(experience)
    if experience.values is not None:
        numbers |= _values(experience)
    if (log_ratio := _log_ratio(experience)) is not None:
        numbers |= _kl(log_ratio, experience.response_mask)
    return {name: float(value) for name, value in numbers.items()} | {"kl/coef": kl_coef}


def _log_ratio(experience: Experience) -> Tensor | None:
    """[B,R] log pi - log pi_ref, 0 outside the mask; None where one of the two was not asked."""
    if experience.logprobs is None or experience.ref_logprobs is None:
        return None
    return approx_kl(experience.logprobs, experience.ref_logprobs).masked_fill(~experience.response_mask, 0.0)


def _kl(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    k1 = log_ratio.double()
    return {
        "kl/ref_seq_mean": k1.sum(1).mean(),
        "kl/ref_token_mean": masked_mean(k1, mask),
        "kl/ref_token_max": k1.max(),
        "kl/k3_token_mean": masked_mean(approx_kl(log_ratio, torch.zeros_like(log_ratio), "k3"), mask),
    }


def _parity(experience: Experience) -> dict[str, Tensor]:
    """How far apart generation and training saw the same tokens."""
    gap = (experience.decode_logprobs - experience.logprobs).abs().masked_fill(~experience.response_mask, 0.0)
    return {
        "parity/logp_abs_diff_mean": masked_mean(gap.double(), experience.response_mask),
        "parity/logp_abs_diff_max": gap.max(),
    }


def _values(experience: Experience) -> dict[str, Tensor]:
    returns, mask = experience.returns.double(), experience.value_mask
    mean = masked_mean(returns, mask)
    return {
        "value/pred_mean": masked_mean(experience.values.double(), mask),
        "value/return_mean": mean,
        "value/return_std": masked_mean((returns - mean) ** 2, mask).sqrt(),
    }


def _unique(experience: Experience) -> int:
    rows = zip(
        experience.ids[:, experience.prompt_width :].tolist(),
        experience.response_lengths.tolist(),
        strict=True,
    )
    return len({tuple(ids[:length]) for ids, length in rows})


def sample_rows(experience: Experience, tokenizer: Tokenizer, limit: int) -> list[dict[str, Any]]:
    """The first ``limit`` answers (-1: all) as text with their score, summed KL (nats), length (tokens), finish and the token that ended them."""
    log_ratio = _log_ratio(experience)
    kl = [None] * len(experience) if log_ratio is None else log_ratio.sum(1).tolist()
    rows = []
    for i in range(len(experience) if limit < 0 else min(limit, len(experience))):
        prompt = experience.ids[i, : experience.prompt_width][
            experience.attention_mask[i, : experience.prompt_width]
        ]
        answer = experience.ids[i, experience.prompt_width :][: experience.response_lengths[i]]
        rows.append(
            {
                "prompt": tokenizer.decode(prompt.tolist(), skip_special_tokens=False),
                "response": tokenizer.decode(answer.tolist()),
                "score": float(experience.scores[i]),
                "kl": kl[i],
                "length": len(answer),
                "finish": "stop" if experience.finished[i] else "length",
                "ended_by": tokenizer.decode(answer[-1:].tolist(), skip_special_tokens=False)
                if experience.finished[i]
                else None,
            }
        )
    return rows
