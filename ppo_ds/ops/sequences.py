"""Masks, positions and position ids of sequences. P: padded prompt width (left), T: response width (right).

Masks come from lengths and stop tokens, never from ``ids != pad``, which would mask the EOS if pad == eos.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ppo_ds.ops.masked import keep


def pad_rows(rows: Sequence[Sequence[int]], value: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Pads rows of ids with ``value`` to a batch [B,T]; returns it and its mask, False only at padding."""
    padded = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = padded([torch.tensor(row, dtype=torch.long) for row in rows], padding_value=value)
    return ids, padded([torch.ones(len(row), dtype=torch.bool) for row in rows])


def response_mask(
    response_ids: Tensor,
    stop_token_ids: Sequence[int],
    lengths: Tensor | None = None,
    include_eos: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the action mask [B,T], the length of each response [B], and whether it has a stop token [B].

    A response ends with its first stop token, or after ``lengths`` [B] (None: T) generated tokens. Without
    ``include_eos``, the stop token is no action, but counts in the length.
    """
    width = response_ids.shape[1]
    positions = torch.arange(width, device=response_ids.device)
    generated = (
        torch.full_like(response_ids[:, :1], width)
        if lengths is None
        else lengths.to(positions.device)[:, None]
    )
    stops = torch.isin(response_ids, response_ids.new_tensor(list(stop_token_ids))) & (positions < generated)
    finished = stops.any(dim=1)
    first_stop = torch.where(stops, positions, width).amin(dim=1)
    lengths = torch.where(finished, first_stop + 1, generated[:, 0])
    actions = lengths if include_eos else lengths - finished.long()
    return positions < actions[:, None], lengths, finished


def response_slice(x: Tensor, prompt_width: int, response_width: int) -> Tensor:
    """Returns the positions from which response tokens are predicted, as a view: [B,P+T,...] -> [B,T,...].

    These are the positions P-1 .. P+T-2 of logits or values.
    """
    assert prompt_width >= 1 and x.shape[1] >= prompt_width + response_width - 1, (
        tuple(x.shape),
        prompt_width,
        response_width,
    )
    return x[:, prompt_width - 1 : prompt_width - 1 + response_width]


def last_token_index(mask: Tensor) -> Tensor:
    """Returns the last position with mask = 1 of each row, -1 for an empty row: [B,T] -> [B] long."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.nn.functional.pad(torch.where(mask.bool(), positions, -1), (1, 0), value=-1).amax(dim=1)


def next_token_mask(mask: Tensor) -> Tensor:
    """Returns ``mask`` [B,T] with the position after the last token set too; a full row stays unchanged."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return (mask.bool() | (positions == last_token_index(mask)[:, None] + 1)).to(mask.dtype)


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Numbers the attended positions of each row 0, 1, 2, ...: [B,S] -> [B,S] long; masked positions get 1.

    Without these position ids, left padding shifts the learned position embeddings of GPT-2 and OPT.
    """
    attended = attention_mask.bool()
    return torch.where(attended, attended.long().cumsum(dim=1) - 1, 1)


def broadcast_sequence(x: Tensor, mask: Tensor) -> Tensor:
    """Copies the value of each sequence [B] to its tokens [B,T]; 0 where mask = 0."""
    return keep(x[:, None].expand(mask.shape), mask)
