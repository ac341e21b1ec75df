"""Masks, places and position ids of prompt + response sequences.

B sequences, P padded prompt width (left), T padded response width (right). Masks come from lengths and stop tokens, never from
``ids != pad``: where pad == eos that comparison loses the EOS, and with it the action that the score is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_ds.ops.masked import keep


def response_mask(
    response_ids: Tensor,
    stop_token_ids: Sequence[int],
    lengths: Tensor | None = None,
    include_eos: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which response tokens are actions of the policy.

    response_ids [B,T]; ``lengths`` [B]: generated tokens per row where the backend knows them (what lies beyond is padding).
    Returns mask [B,T] bool, lengths [B] long up to and including the first stop token, finished [B] bool (a stop token came).
    include_eos=False takes the stop token out of the mask, but not out of the lengths: it was generated and is attended to.
    """
    width = response_ids.shape[1]
    places = torch.arange(width, device=response_ids.device)
    generated = (
        torch.full_like(response_ids[:, :1], width) if lengths is None else lengths.to(places.device)[:, None]
    )
    stops = torch.isin(response_ids, response_ids.new_tensor(list(stop_token_ids))) & (places < generated)
    finished = stops.any(dim=1)
    first_stop = torch.where(stops, places, width).amin(dim=1)
    lengths = torch.where(finished, first_stop + 1, generated[:, 0])
    actions = lengths if include_eos else lengths - finished.long()
    return places < actions[:, None], lengths, finished


def response_slice(x: Tensor, prompt_width: int, response_width: int) -> Tensor:
    """x [B,P+T,...] of logits or values -> [B,T,...]: places P-1 .. P+T-2, the states before each response token. A view."""
    assert prompt_width >= 1 and x.shape[1] >= prompt_width + response_width - 1, (
        tuple(x.shape),
        prompt_width,
        response_width,
    )
    return x[:, prompt_width - 1 : prompt_width - 1 + response_width]


def last_token_index(mask: Tensor) -> Tensor:
    """[B,T] -> [B] long: the last place with mask = 1; -1 for an empty row."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return torch.nn.functional.pad(torch.where(mask.bool(), places, -1), (1, 0), value=-1).amax(dim=1)


def next_token_mask(mask: Tensor) -> Tensor:
    """[B,T] -> the mask with one more place per row: the one after its last token (the first one of an empty row).

    A row without room stays as it is. Same dtype as ``mask``. DeepSpeed-Chat and TRL put the score there.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    return (mask.bool() | (places == last_token_index(mask)[:, None] + 1)).to(mask.dtype)


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """[B,S] -> [B,S] long: 0, 1, 2, ... over the attended places, 1 elsewhere (any valid position will do there).

    Without them left padding shifts the positions of models with learned embeddings (GPT-2, OPT).
    """
    attended = attention_mask.bool()
    return torch.where(attended, attended.long().cumsum(dim=1) - 1, 1)


def broadcast_sequence(x: Tensor, mask: Tensor) -> Tensor:
    """One number per sequence [B] -> the same number on each of its tokens [B,T], 0 elsewhere."""
    return keep(x[:, None].expand(mask.shape), mask)
