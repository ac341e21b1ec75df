"""Models that lay out the rows of a forward padded or packed, and the choice between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_ds.models.packed_attention import listening, ours, packs, why_not_packed

_FIRST, _SECOND = 8, 24  # tokens of the two rows of the trial


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that a model chose, for the start-up banner."""

    packed: bool
    reason: str | None = None  # why its rows are padded although the layout asked for packed ones
    kernel: bool = False  # whether a kernel computes the packed attention of every layer


class PackableModel(nn.Module):
    """Base of models with a trunk of transformers whose forwards take padded or packed rows."""

    def __init__(self) -> None:
        super().__init__()
        self._packed = False

    @property
    def trunk(self) -> PreTrainedModel:
        """The model of transformers."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding, which token ids must be below."""
        raise NotImplementedError

    @property
    def packed(self) -> bool:
        """Whether forwards pack their rows into one."""
        return self._packed

    def use_packed_layout(self, packed: bool) -> None:
        """Sets whether forwards pack their rows. Not every model can: see ``choose_layout``."""
        self._packed = packed

    def choose_layout(
        self, layout: str, device: torch.device, forward: Callable[[Tensor, Tensor, int], Any]
    ) -> LayoutChoice:
        """Decides and sets ``memory.layout`` (auto, packed or padded) for this model.

        A model that may pack its rows is tried first, since no flag of its class tells what its layers do
        with their arguments. ``forward`` calls this model through its engine: two forwards, a collective
        under ZeRO-3.
        """
        self._packed = False
        if not packs(self.trunk, layout, device):
            return LayoutChoice(False, why_not_packed(self.trunk) if layout == "packed" else None)
        fault, kernel = self._try_packed(forward)
        self._packed = fault is None and (kernel or layout == "packed")
        return LayoutChoice(self._packed, fault, kernel)

    def _try_packed(self, forward: Callable[[Tensor, Tensor, int], Any]) -> tuple[str | None, bool]:
        """Compares the hidden states of two short rows, padded and packed.

        Returns why the model cannot be packed, or None, and whether a kernel takes the heads of every layer.
        Only the second row can attend to tokens that it should not. The median over its tokens is compared,
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
                self._packed = True
                with listening() as heard:
                    forward(ids, mask, 1)
        finally:
            hook.remove()
            self._packed = False
        if ours(self.trunk) and heard.fault is not None:
            return heard.fault, False
        padded, packed = states
        gap = float(((packed - padded).norm(dim=1) / padded.norm(dim=1)).median())
        if gap < (1e-3 if self.trunk.dtype == torch.float32 else 0.1):
            return None, all(heard.kernel)
        return f"{type(self.trunk).__name__} computes other states where rows are packed", all(heard.kernel)
