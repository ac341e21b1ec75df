"""AdamW with moments of 8 bits (Dettmers et al. 2022), from bitsandbytes.

Each element of a moment is stored as an 8-bit code, the index of a number in a table. The element's value is
that number times the scale of its block of 256 elements. Checkpoints store moments in fp32, so that they
depend neither on blocks nor on the optimizer. If the blocks are the same, ``encoded`` finds codes and scales
that decode to exactly these values. A step depends only on the values, so a run that resumes with the same
ranks and ZeRO stage continues bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256
# names of a moment in torch's AdamW and of its codes, table and scales in bitsandbytes
MOMENTS = (("exp_avg", "state1", "qmap1", "absmax1"), ("exp_avg_sq", "state2", "qmap2", "absmax2"))


def make_adamw_8bit(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Returns an optimizer that keeps all moments in 8 bits, at every ZeRO stage."""
    from bitsandbytes.optim import AdamW8bit  # an extra

    return AdamW8bit(groups, min_8bit_size=1, **settings)


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return not isinstance(optimizer, torch.optim.AdamW)


def add_fp32_moments(optimizer: Any, shares: list[Tensor]) -> None:
    """Adds fp32 moments of ``shares`` (from ``optimizer_shares``) to an 8-bit optimizer's states."""
    groups = optimizer.param_groups
    for share in shares:
        if not optimizer.state[share]:  # before the first step; with ZeRO-3 the groups are empty
            optimizer.param_groups = [groups[0] | {"params": [share]}]
            optimizer.init_state(optimizer.param_groups[0], share, 0, 0)
        state = optimizer.state[share]
        for name, *stored in MOMENTS:
            state[name] = decoded(*(state[part] for part in stored))
    optimizer.param_groups = groups


def remove_fp32_moments(optimizer: Any, *, store: bool) -> None:
    """Removes the fp32 moments; with ``store``, encodes them as the optimizer's 8-bit moments first."""
    for state in optimizer.state.values():
        for name, codes, table, scales in MOMENTS:
            values = state.pop(name)
            if store:
                state[codes], state[scales] = encoded(values, state[table])


def decoded(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Computes the fp32 values of 8-bit codes; ``scales`` has one number for each block."""
    return table[codes.int()].mul_(scales.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape))


def encoded(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales that decode to exactly ``values``, if any do, and otherwise to close ones.

    The scale is computed from the element of largest magnitude in the block. The table covers -0.993 to 1, so
    a scale computed from a negative element may be wrong in the last bits: adjacent floats are tried too.
    """
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = torch.maximum(blocks.amax(1), blocks.amin(1) / table[0] if table[0] < 0 else blocks.amax(1))
    offsets = torch.tensor([0, 1, -1, 2, -2], dtype=torch.int32, device=values.device)
    borders, codes, scales = (table[1:] + table[:-1]) / 2, [], []
    for part, scale in zip(blocks.split(2**12), largest.split(2**12), strict=True):  # to save memory
        tried = (scale.view(torch.int32)[:, None] + offsets).view(torch.float32)[..., None]
        found = torch.bucketize(part[:, None] / tried, borders)
        exact = (table[found] * tried == part[:, None]).all(-1, keepdim=True)
        best = exact.int().argmax(1, keepdim=True)  # the first scale if none is exact
        codes.append(found.take_along_dim(best, 1)[:, 0].to(torch.uint8))
        scales.append(tried.take_along_dim(best, 1)[:, 0, 0])
    return torch.cat(codes).flatten()[: values.numel()].view(values.shape), torch.cat(scales)
