"""Base of models whose forwards take padded or packed rows, and the choice between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_ds.models.packed_attention import (
    may_pack,
    record_attention_calls,
    uses_attention_interface,
    why_not_packed,
)

_FIRST, _SECOND = 8, 24  # tokens in the two rows of the trial


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that a model chose, for the start-up banner."""

    packed: bool
    reason: str | None = None  # why rows are padded with memory.layout=packed, or after a failed trial
    kernel: bool = False  # whether a kernel computes the packed attention of every layer


class PackableModel(nn.Module):
    """Model with a transformers trunk whose forwards take padded or packed rows.

    ``packed`` tells whether a forward packs its rows into one. ``choose_layout`` sets it, since not every
    model supports packed rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.packed = False

    @property
    def trunk(self) -> PreTrainedModel:
        """The transformers model that computes the hidden states."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding, which token ids must be below."""
        raise NotImplementedError

    def choose_layout(
        self, layout: str, device: torch.device, forward: Callable[[Tensor, Tensor, int], Any]
    ) -> LayoutChoice:
        """Chooses and sets the layout of this model for ``memory.layout`` (auto, packed or padded).

        Packed rows are tried first, since no flag of a model's class shows what its layers do with the ends
        of the sequences. ``forward`` calls this model through its engine. It is called twice, which is a
        collective under ZeRO-3.
        """
        self.packed = False
        if not may_pack(self.trunk, layout, device):
            return LayoutChoice(False, why_not_packed(self.trunk) if layout == "packed" else None)
        fault, kernel = self._try_packed(forward)
        self.packed = fault is None and (kernel or layout == "packed")
        return LayoutChoice(self.packed, fault, kernel)

    def _try_packed(self, forward: Callable[[Tensor, Tensor, int], Any]) -> tuple[str | None, bool]:
        """Compares the hidden states of two short rows, padded and packed.

        Returns why rows cannot be packed, or None, and whether a kernel supports the heads of every layer.
        Only the second row could attend to tokens of another row. The median over its tokens is compared,
        since rounding may route one of them to another expert.
        """
        ids = torch.arange(2 * _SECOND).view(2, _SECOND) % self.vocab_size
        mask = torch.ones(2, _SECOND, dtype=torch.bool)
        mask[0, _FIRST:] = False
        states: list[Tensor] = []  # of the second row
        hook = self.trunk.base_model.register_forward_hook(
            lambda _module, _inputs, out: states.append(out.last_hidden_state[-1, -_SECOND:].float())
        )
        try:
            with torch.no_grad():
                forward(ids, mask, 1)
                self.packed = True
                with record_attention_calls() as calls:
                    forward(ids, mask, 1)
        finally:
            hook.remove()
            self.packed = False
        if uses_attention_interface(self.trunk) and calls.fault is not None:
            return calls.fault, False
        padded, packed = states
        gap = float(((packed - padded).norm(dim=1) / padded.norm(dim=1)).median())
        equal = gap < (1e-3 if self.trunk.dtype == torch.float32 else 0.1)
        fault = None if equal else f"{type(self.trunk).__name__} computes other states in packed rows"
        return fault, all(calls.kernel)
