"""From one score per answer to one reward per token. Nothing here carries a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.ops.masked import keep, widen
from ppo_ds.ops.sequences import last_token_index

MissingEOS = Literal[None, "subtract", "set", "scale"]


@torch.no_grad()
def shape_scores(
    scores: Tensor,
    *,
    finished: Tensor | None = None,
    lengths: Tensor | None = None,
    max_new_tokens: int | Tensor | None = None,
    clip: float | None = None,
    normalizer: Callable[[Tensor], Tensor] | None = None,
    missing_eos: MissingEOS = None,
    missing_eos_value: float = 1.0,
    overlong_buffer: int | Tensor | None = None,
    overlong_factor: float = 1.0,
) -> Tensor:
    """scores [B] -> [B]: penalties first, then the normaliser, then the clip, so that no penalty escapes the clip.

    missing_eos, for answers that were cut off (finished = False): "subtract" the value from the score, "set" the score to the
    value, or "scale" it by the value.
    overlong_buffer (DAPO): over the last ``overlong_buffer`` of ``max_new_tokens`` (a number, or [B]) the penalty grows linearly to overlong_factor.
    normalizer: maps [B] to [B]; its statistics, running or fixed, are its own. clip: limits to +-clip.
    """
    scores = widen(scores)
    if missing_eos is not None:
        assert finished is not None, "missing_eos needs finished"
        scores = torch.where(finished.bool(), scores, _cut_off(scores, missing_eos, missing_eos_value))
    if overlong_buffer is not None:
        assert lengths is not None and max_new_tokens is not None, (
            "overlong_buffer needs lengths and max_new_tokens"
        )
        excess = (lengths - (max_new_tokens - overlong_buffer)).to(scores.dtype) / overlong_buffer
        scores = scores - overlong_factor * excess.clamp(0, 1)
    if normalizer is not None:
        scores = normalizer(scores)
    return scores if clip is None else scores.clamp(-clip, clip)


def _cut_off(scores: Tensor, mode: MissingEOS, value: float) -> Tensor:
    match mode:
        case "subtract":
            return scores - value
        case "set":
            return torch.full_like(scores, value)
        case "scale":
            return scores * value
    raise ValueError(f"unknown missing_eos {mode!r}: subtract, set or scale")


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    mask: Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    place: Literal["last_token", "next_token"] = "last_token",
    token_scores: Tensor | None = None,
) -> Tensor:
    """scores [B], mask [B,T] -> rewards [B,T]: -kl_coef * kl (+ token_scores) on each token, + the score at one place.

    "last_token": the last place with mask = 1, EOS if it is an action; an empty row has no such place and gets nothing.
    "next_token": one place further, where mask = 0 (at the last place if there is no room). That place is a state of its own for
    the advantages: give ``next_token_mask(mask)`` to compute_gae and to value_loss (DeepSpeed-Chat, TRL).
    """
    if place not in ("last_token", "next_token"):
        raise ValueError(f"unknown place {place!r}: last_token or next_token")
    scores = widen(scores)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if kl is not None:
        rewards = rewards - kl_coef * keep(kl, mask)
    if token_scores is not None:
        rewards = rewards + keep(token_scores, mask)
    index = last_token_index(mask)
    if place == "next_token":
        index = (index + 1).clamp(max=mask.shape[1] - 1)
    at_index = torch.arange(mask.shape[1], device=mask.device) == index[:, None]
    return rewards + torch.where(at_index, scores[:, None], 0.0)
