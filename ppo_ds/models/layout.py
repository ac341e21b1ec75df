"""Lays out the rows of a micro-batch for a forward, padded or packed.

A micro-batch [B,T] has prompts padded on the left and responses padded on the right. Most of that padding is
unnecessary, since the longest prompt and the longest response are rarely in the same row. A layout makes the
tokens of each row contiguous:

    padded  [B,n]: every row begins at column 0; n is the largest number of tokens in a row. Padding comes
        after all tokens of a row, so that causal attention needs no mask and can use its fastest kernel.
    packed  [1,t]: all rows are concatenated, t tokens without padding; attention stays within each row
        (packed_attention.py).

With a sequence group, each rank of the group gets an equal part of the columns of a packed layout.

Indices are computed on the CPU from the mask. If ids and mask are on the CPU, a forward never waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ppo_ds.distributed.sequence_group import SequenceGroup
from ppo_ds.models.packed_attention import packed_arguments
from ppo_ds.types import to_device


@dataclass(frozen=True)
class Layout:
    """Input [b,t] of a forward for a micro-batch of B rows and R response columns, with index tensors.

    The indices map between the input and the micro-batch. All tensors are on the device of the model. K is
    the number of labels, which are the response tokens whose log-probs are computed. N is the number of
    states that get a value: in each row, the states before each response token and after the last token.
    """

    ids: Tensor  # [b,t]
    position_ids: Tensor  # [b,t] 0, 1, 2, ... in each row, padding included
    mask: Tensor  # [b,t] bool: False at padding
    packing: dict[str, Any]  # keyword arguments of a packed forward; {} if padded
    lengths: list[int]  # number of tokens of each row
    # the next three are indices into the flattened input [b*t]
    label_positions: Tensor  # [K] the token before each label
    state_positions: Tensor  # [N] the token before each response token, and the last token of each row
    last_positions: Tensor  # [B] the last token of each row; not valid with ``sequence``
    labels: Tensor  # [K]
    label_indices: Tensor  # [K] indices of the labels in the flattened [B*R]
    state_indices: Tensor  # [N] indices of the states in the flattened [B*(R+1)]
    rows: int  # B
    width: int  # R
    sequence: SequenceGroup | None  # the ranks that divide the tokens; K and N then count only this rank's

    def arguments(self, positions: bool = True, masked: bool = False) -> dict[str, Any]:
        """Returns the keyword arguments for the forward pass of a causal model.

        ``positions`` adds position ids. ``masked`` adds the padding mask of a padded layout, for computations
        that are not causal, such as the load-balancing loss of a mixture of experts.
        """
        mask = self.mask.long() if masked and not self.packing else None
        arguments = {"input_ids": self.ids, "attention_mask": mask, "use_cache": False} | self.packing
        return arguments | {"position_ids": self.position_ids} if positions else arguments

    def scatter(self, values: Tensor) -> Tensor:
        """Scatters values [K] of labels to [B,R]; all other columns are 0."""
        return self._scattered(values, self.label_indices, self.width)

    def scatter_states(self, values: Tensor) -> Tensor:
        """Scatters values [N] of states to [B,R+1]; columns beyond a row's final state are 0."""
        return self._scattered(values, self.state_indices, self.width + 1)

    def _scattered(self, values: Tensor, indices: Tensor, width: int) -> Tensor:
        """Returns [B,width], 0 except for ``values`` at the flat ``indices``, summed over ``sequence``."""
        scattered = values.new_zeros(self.rows * width).index_copy(0, indices, values).view(self.rows, width)
        return scattered if self.sequence is None else self.sequence.sum(scattered)


def row_extents(mask: Tensor, response_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each row's number of tokens, first column and number of response tokens, [B] each.

    Asserts that the tokens of each row are contiguous, with at least one before the response.
    """
    columns = mask.shape[1]
    lengths, responses = mask.sum(1), mask[:, columns - response_width :].sum(1)
    assert bool((lengths > responses).all()), "a row without a token before its response"
    first = mask.int().argmax(1)
    contiguous = columns - mask.flip(1).int().argmax(1) - first == lengths
    assert bool(contiguous.all()), "padding between the tokens of a row"
    return lengths, first, responses


def make_layout(
    ids: Tensor,
    attention_mask: Tensor,
    response_width: int,
    model: nn.Module,
    *,
    packed: bool,
    label_mask: Tensor | None = None,
    sequence: SequenceGroup | None = None,
) -> Layout:
    """Makes the layout of ids and attention_mask [B,T], which are on the CPU or on the device of ``model``.

    The last ``response_width`` columns are the responses (0 if the rows have no responses). ``label_mask``
    [B,R] selects the response tokens that are labels (None: all of them). The ranks of ``sequence`` divide
    the columns of a packed layout.
    """
    device = next(model.parameters()).device if ids.device.type == "cpu" else ids.device
    mask = attention_mask.cpu().bool()
    rows, columns = mask.shape
    lengths, first, response_lengths = row_extents(mask, response_width)
    real = torch.arange(int(lengths.max())) < lengths[:, None]  # [B,n]
    starts = torch.arange(rows)[:, None] * columns + first[:, None]
    source = (starts + torch.arange(real.shape[1])).clamp(max=mask.numel() - 1)  # indices into [B*T]
    positions = torch.arange(real.shape[1]).expand_as(source)
    if packed:
        source, positions, start = source[real][None], positions[real][None], lengths.cumsum(0) - lengths
    else:
        start = torch.arange(rows) * real.shape[1]
    columns_of_states = torch.arange(response_width + 1)
    last_of_prompt = (start + lengths - response_lengths - 1)[:, None]
    states = last_of_prompt + columns_of_states  # [B,R+1] indices into [b*t]
    around = columns_of_states <= response_lengths[:, None]
    before = around[:, 1:] if label_mask is None else around[:, 1:] & label_mask.cpu()
    if sequence is not None:
        assert packed, "a padded layout is not divided among ranks"
        filled = (pad(x, (0, -x.shape[1] % sequence.size)) for x in (source, positions))
        source, positions = (x.chunk(sequence.size, dim=1)[sequence.rank] for x in filled)
        states -= sequence.rank * source.shape[1]
        here = (states >= 0) & (states < source.shape[1])
        before, around = before & here[:, :-1], around & here

    on_device = partial(to_device, device=device)
    ids = on_device(ids)
    label_indices = on_device(before.flatten().nonzero()[:, 0])
    return Layout(
        ids=ids.flatten()[on_device(source)],
        position_ids=on_device(positions),
        mask=on_device(torch.ones_like(source, dtype=torch.bool) if packed else real),
        packing=packed_arguments(lengths.tolist(), device, sequence) if packed else {},
        lengths=lengths.tolist(),
        label_positions=on_device(states[:, :response_width][before]),
        state_positions=on_device(states[around]),
        last_positions=on_device(start + lengths - 1),
        labels=ids[:, columns - response_width :].flatten()[label_indices],
        label_indices=label_indices,
        state_indices=on_device(around.flatten().nonzero()[:, 0]),
        rows=rows,
        width=response_width,
        sequence=sequence,
    )
