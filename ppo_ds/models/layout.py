"""Lays out the rows of a micro-batch for a forward, padded or packed.

A micro-batch [B,T] has prompts padded on the left and answers padded on the right: wasteful in a
forward, since the longest prompt and the longest answer are seldom in one row. Here the tokens of each row
are moved together:

    padded  [B,n]: every row begins at column 0, n the longest total. What pads comes after all that is real,
        so that causal attention needs no mask, and can use its fastest kernel.
    packed  [1,N]: all rows one after the other in a single one, N real tokens and no padding; attention stays
        within each (attention.py).

Indices are made on the CPU from the mask: a forward that is given ids and mask there waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.models.packed_attention import packed_arguments
from ppo_ds.types import moved


@dataclass(frozen=True)
class Layout:
    """B rows with R places for the answer each, as [b,t] of a forward.

    All tensors are on the device of the model.
    """

    ids: Tensor  # [b,t]
    position_ids: Tensor  # [b,t] 0, 1, 2, ... within each row, and on into its padding
    mask: Tensor  # [b,t] bool: the real tokens
    packing: dict[str, Any]  # what a packed forward is called with; {} where it is padded
    places: Tensor  # [K] into [b*t]: the states before each token of the answers
    labels: Tensor  # [K] those tokens
    cells: Tensor  # [K] into [B*R]: where they are in the micro-batch
    state_places: (
        Tensor  # [K+B] into [b*t]: the states around the tokens of the answers, those after the last ones too
    )
    state_cells: Tensor  # [K+B] into [B*(R+1)]
    last_places: Tensor  # [B] into [b*t]: the last token of each row
    rows: int  # B
    width: int  # R

    def arguments(self, positions: bool = True, masked: bool = False) -> dict[str, Any]:
        """Returns the arguments of a causal model.

        ``positions``: whether it takes position ids. ``masked``: adds the padding mask, for what is not
        causal (how evenly a mixture of experts spreads its tokens).
        """
        there = {"position_ids": self.position_ids} if positions else {}
        mask = self.mask.long() if masked and not self.packing else None
        return {"input_ids": self.ids, "attention_mask": mask, "use_cache": False, **there, **self.packing}

    def spread(self, values: Tensor) -> Tensor:
        """Scatters [K] to [B,R], 0 beyond the end of each answer."""
        return (
            values.new_zeros(self.rows * self.width)
            .index_copy(0, self.cells, values)
            .view(self.rows, self.width)
        )

    def spread_states(self, values: Tensor) -> Tensor:
        """Scatters [K+B] to [B,R+1], 0 beyond the state after each answer's last token."""
        return (
            values.new_zeros(self.rows * (self.width + 1))
            .index_copy(0, self.state_cells, values)
            .view(self.rows, self.width + 1)
        )


def lay_out(
    ids: Tensor, attention_mask: Tensor, response_width: int, model: nn.Module, *, packed: bool
) -> Layout:
    """Makes the layout of ids and attention_mask [B,T], which are on the CPU or on the device of ``model``.

    The last ``response_width`` columns are the responses (0: rows without responses).

    Each row has its real tokens side by side, at least one before its answer.
    """
    device = next(model.parameters()).device if ids.device.type == "cpu" else ids.device
    mask = attention_mask.cpu().bool()
    rows, columns = mask.shape
    answered = mask[:, columns - response_width :].sum(1)
    lengths, first = mask.sum(1), mask.int().argmax(1)
    prompts = lengths - answered
    assert bool((prompts > 0).all()), "a row without a token before its answer"
    assert bool((columns - mask.flip(1).int().argmax(1) - first == lengths).all()), (
        "padding between the tokens of a row"
    )
    real = torch.arange(int(lengths.max())) < lengths[:, None]  # [B,n]
    source = (torch.arange(rows)[:, None] * columns + first[:, None] + torch.arange(real.shape[1])).clamp(
        max=mask.numel() - 1
    )  # into [B*T]
    positions = torch.arange(real.shape[1]).expand_as(source)
    if packed:
        source, positions, start = source[real][None], positions[real][None], lengths.cumsum(0) - lengths
    else:
        start = torch.arange(rows) * real.shape[1]
    states = (start + prompts - 1)[:, None] + torch.arange(response_width + 1)  # [B,R+1] into [b*t]
    before = torch.arange(response_width) < answered[:, None]
    around = torch.arange(response_width + 1) <= answered[:, None]

    def there(tensor: Tensor) -> Tensor:
        return moved(tensor, device)

    ids = there(ids)
    cells = before.flatten().nonzero()[:, 0]
    return Layout(
        ids=ids.flatten()[there(source)],
        position_ids=there(positions),
        mask=there(torch.ones_like(source, dtype=torch.bool) if packed else real),
        packing=packed_arguments(lengths.tolist(), device) if packed else {},
        places=there(states[:, :response_width][before]),
        labels=ids[:, columns - response_width :].flatten()[there(cells)],
        cells=there(cells),
        state_places=there(states[around]),
        state_cells=there(around.flatten().nonzero()[:, 0]),
        last_places=there(start + lengths - 1),
        rows=rows,
        width=response_width,
    )
