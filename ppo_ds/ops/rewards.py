"""Shaping of scores and their conversion to per-token rewards. Results carry no gradient."""

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
    """Applies penalties, then the normaliser, then the clip: scores [B] -> [B].

    The clip comes last so that it also limits the penalties.

    Args:
        missing_eos: For truncated responses (finished = False), "subtract" missing_eos_value from the score,
            "set" the score to it, or "scale" the score by it.
        overlong_buffer: Soft overlong penalty (DAPO). Over the last ``overlong_buffer`` of ``max_new_tokens``
            tokens (an integer or [B]) the penalty grows linearly to ``overlong_factor``.
        normalizer: Maps [B] to [B]; it holds its own running or fixed statistics.
        clip: Limits the score to +-clip.
    """
    scores = widen(scores)
    if missing_eos is not None:
        assert finished is not None, "missing_eos needs finished"
        match missing_eos:
            case "subtract":
                truncated = scores - missing_eos_value
            case "set":
                truncated = torch.full_like(scores, missing_eos_value)
            case "scale":
                truncated = scores * missing_eos_value
            case _:
                raise ValueError(f"unknown missing_eos {missing_eos!r}: subtract, set or scale")
        scores = torch.where(finished.bool(), scores, truncated)
    if overlong_buffer is not None:
        assert lengths is not None and max_new_tokens is not None, (
            "overlong_buffer needs lengths and max_new_tokens"
        )
        excess = (lengths - (max_new_tokens - overlong_buffer)).to(scores.dtype) / overlong_buffer
        scores = scores - overlong_factor * excess.clamp(0, 1)
    if normalizer is not None:
        scores = normalizer(scores)
    return scores if clip is None else scores.clamp(-clip, clip)


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    mask: Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    place: Literal["last_token", "next_token"] = "last_token",
    token_scores: Tensor | None = None,
) -> Tensor:
    """Computes per-token rewards: -kl_coef * kl (+ token_scores) at each token, + the score at one position.

    Args:
        scores: [B].
        mask: [B,T].
        kl: [B,T].
        place: "last_token" adds the score at the last position with mask = 1, which is EOS if EOS is an
            action; an empty row has no such position and gets no score. "next_token" adds it one position
            later, where mask = 0 (at the last position if the row is full). That position is an additional
            state: pass ``next_token_mask(mask)`` to compute_gae and value_loss (DeepSpeed-Chat, TRL).
        token_scores: [B,T].

    Returns:
        Rewards [B,T].
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
