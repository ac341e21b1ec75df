"""AdamW with moments of 8 bits (Dettmers et al. 2022), from bitsandbytes.

A moment is a code, an index into a table of 256 numbers, times the scale of its block of 256 elements.
Tensors below 4,096 elements have moments in fp32; with ZeRO, a tensor is this rank's share of a parameter
group.

Checkpoints store the moments in fp32, so that they depend neither on blocks nor on the optimizer. ``encoded``
finds codes and scales with exactly these values again if the blocks are the same. A step reads the values
only, so that a resumed run continues bit for bit with the same ranks and ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
SMALLEST = 4096  # elements
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}  # ends of the names that bitsandbytes uses


def make_adamw_8bit(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Returns the optimizer. bitsandbytes is only imported here, since it is an extra."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, min_8bit_size=SMALLEST, **settings)


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return not isinstance(optimizer, torch.optim.AdamW)


def moment_bytes(optimizer: torch.optim.Optimizer, share: Tensor) -> int:
    """Returns the bytes of both moments of ``share``, a tensor that the optimizer updates."""
    return 2 * (1 if is_8bit(optimizer) and share.numel() >= SMALLEST else 4) * share.numel()


@contextmanager
def fp32_moments(optimizer: Any, shares: list[Tensor], *, store: bool) -> Iterator[None]:
    """Adds exp_avg and exp_avg_sq in fp32 to the states of an 8-bit optimizer inside the block.

    ``store`` makes them the moments of the optimizer at the end. torch's AdamW has them anyway.
    """
    shares = shares if is_8bit(optimizer) else []
    states = [_state_of(optimizer, share) for share in shares]
    try:
        for state, (name, end) in ((state, moment) for state in states for moment in MOMENTS.items()):
            state[name] = codes = state[f"state{end}"]
            if codes.dtype == torch.uint8:
                state[name] = decoded(codes, state[f"qmap{end}"], state[f"absmax{end}"])
        yield
        for state, (name, end) in ((state, moment) for state in states for moment in MOMENTS.items()):
            codes = state[f"state{end}"]
            if store and codes.dtype == torch.uint8:
                found, scales = encoded(state[name], state[f"qmap{end}"])
                codes.copy_(found)
                state[f"absmax{end}"].copy_(scales)
    finally:
        for state in states:
            for name in MOMENTS:
                state.pop(name, None)


def _state_of(optimizer: Any, share: Tensor) -> dict[str, Any]:
    """Returns the state of ``share``, which is created if no step has created it."""
    if not optimizer.state[share]:
        groups = optimizer.param_groups
        optimizer.param_groups = [groups[0] | {"params": [share]}]  # with ZeRO-3, the others are empty
        try:
            optimizer.init_state(optimizer.param_groups[0], share, 0, 0)
        finally:
            optimizer.param_groups = groups
    return optimizer.state[share]


def decoded(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Computes the fp32 values of 8-bit codes; ``scales`` has one number for each block."""
    return table[codes.int()].mul_(scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape))


def encoded(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of ``values``, which decode to exactly these values if any do.

    The scale of a block is the number that the largest magnitude was divided by. The table has 1 as its
    largest number, but -0.993 as its smallest, so that a scale that is computed from a negative value may be
    wrong in the last bits. The neighbours are therefore tried too.
    """
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    codes, scales = blocks.new_empty(blocks.shape, dtype=torch.uint8), blocks.amax(1)
    if table[0] < 0:
        scales = torch.maximum(scales, blocks.amin(1) / table[0])
    borders = (table[1:] + table[:-1]) / 2
    for first in range(0, len(blocks), 2**14):  # so that temporary tensors are small
        rows = slice(first, first + 2**14)
        part, best = blocks[rows], scales[rows].clone()
        open_rows = torch.ones(len(part), dtype=torch.bool, device=part.device)
        for offset in (0, 1, -1, 2, -2):
            scale = (best.view(torch.int32) + offset).view(torch.float32)
            found = torch.bucketize(part / scale[:, None], borders)
            exact = (table[found] * scale[:, None] == part).all(1)
            chosen = open_rows & (exact if offset else torch.ones_like(exact))
            codes[rows][chosen], scales[rows][chosen] = found[chosen].to(torch.uint8), scale[chosen]
            open_rows &= ~exact
    return codes.flatten()[: values.numel()].view(values.shape), scales
