"""Whether a model's packed rows are what its padded ones are: tried, since no flag of its class tells what its layers do with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_ds.models.packed_attention import listening, ours
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel

_FIRST, _SECOND = 8, 24  # tokens of the two rows


@dataclass(frozen=True)
class Trial:
    fault: str | None  # why the model cannot be packed
    kernel: bool  # whether every layer's heads are such that a kernel takes them


def try_packed(module: Policy | ScoreModel, forward: Callable[[Tensor, Tensor, int], Any]) -> Trial:
    """Two short rows padded, and packed. ``forward``: the module as its engine calls it; a collective under ZeRO-3.

    Only the second row can read what it should not. The median over its tokens: rounding may send one of them to another expert.
    """
    ids = torch.arange(2 * _SECOND).view(2, _SECOND) % module.vocab_size
    mask = torch.ones(2, _SECOND, dtype=torch.bool)
    mask[0, _FIRST:] = False
    states: list[Tensor] = []  # of the second row
    hook = module.trunk.base_model.register_forward_hook(
        lambda _module, _inputs, out: states.append(out.last_hidden_state[-1, -_SECOND:].float())
    )
    asked = module.packed
    try:
        with torch.no_grad():
            module.packed = False
            forward(ids, mask, 1)
            module.packed = True
            with listening() as heard:
                forward(ids, mask, 1)
    finally:
        hook.remove()
        module.packed = asked
    if ours(module.trunk) and heard.fault is not None:
        return Trial(heard.fault, False)
    padded, packed = states
    gap = float(((packed - padded).norm(dim=1) / padded.norm(dim=1)).median())
    close = gap < (1e-3 if module.trunk.dtype == torch.float32 else 0.1)
    return Trial(
        None if close else f"{type(module.trunk).__name__} computes other states where rows are packed",
        all(heard.kernel),
    )
