"""Base class of models that take padded or packed rows, and the choice between the two layouts."""

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

_FIRST, _SECOND = 8, 24  # numbers of tokens in the two rows that ``_try_packed`` compares


@dataclass(frozen=True)
class LayoutChoice:
    """Result of ``choose_layout``, shown in the start-up banner."""

    packed: bool
    # why rows are padded although memory.layout=packed, or after ``_try_packed`` failed
    reason: str | None = None
    kernel: bool = False  # whether a kernel computes the packed attention of every layer


class PackableModel(nn.Module):
    """Model with a transformers trunk that takes padded or packed rows.

    If ``packed`` is true, a forward concatenates its rows into one. ``choose_layout`` sets it, since not
    every model supports packed rows.
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
        """The number of rows of the embedding; all token ids must be smaller."""
        raise NotImplementedError

    def choose_layout(
        self, layout: str, device: torch.device, forward: Callable[[Tensor, Tensor, int], Any]
    ) -> LayoutChoice:
        """Chooses and sets the layout of this model for ``memory.layout`` (auto, packed or padded).

        Packed rows are first tested with two forwards, since no flag of a model class shows whether its
        layers respect the ends of the sequences. ``forward`` calls this model through its engine, which is a
        collective under ZeRO-3.
        """
        self.packed = False
        if not may_pack(self.trunk, layout, device):
            return LayoutChoice(False, why_not_packed(self.trunk) if layout == "packed" else None)
        fault, kernel = self._try_packed(forward)
        self.packed = fault is None and (kernel or layout == "packed")
        return LayoutChoice(self.packed, fault, kernel)

    def _try_packed(self, forward: Callable[[Tensor, Tensor, int], Any]) -> tuple[str | None, bool]:
        """Compares the hidden states of two short rows between a padded and a packed forward.

        Returns the reason why rows cannot be packed, or None, and whether a kernel supports the heads of
        every layer. Only the second row is compared, since only its tokens come after those of another row.
        The median over its tokens is used, since rounding may route a token to another expert.
        """
        ids = torch.arange(2 * _SECOND).view(2, _SECOND) % self.vocab_size
        mask = torch.ones(2, _SECOND, dtype=torch.bool)
        mask[0, _FIRST:] = False
        # Hidden states of the second row, padded and then packed. The first forward of a policy may run its
        # trunk twice, to probe the head.
        states: list[Tensor] = []
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
        if not states:  # OPT calls the decoder inside its base model
            return f"{type(self.trunk).__name__} does not call its base model", False
        padded, packed = states[-2:]
        gap = float(((packed - padded).norm(dim=1) / padded.norm(dim=1)).median())
        equal = gap < (1e-3 if self.trunk.dtype == torch.float32 else 0.1)
        fault = None if equal else f"{type(self.trunk).__name__} computes other states in packed rows"
        return fault, all(calls.kernel)
