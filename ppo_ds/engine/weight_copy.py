"""Second set of an engine's trained weights: the exponential moving average of a policy, or a lagging copy.

Each rank keeps its share of the copy in fp32, partitioned like the optimizer's master weights. Updates
therefore need no communication and work in the same way for every ZeRO stage. An average of the module's
parameters would not work: with ZeRO-3 they are empty between forwards, and in 16 bits small changes would be
lost to rounding. ``swapped`` exchanges the copy with the engine's weights for all uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ppo_ds.engine.master_weights import MasterWeights, optimizer_shares
from ppo_ds.engine.trained import TrainedModel

CHUNK_ELEMENTS = 16 * 1024**2  # elements that ``swapped`` exchanges at a time: 64 MiB of temporary memory


class WeightCopy:
    """Copy of the trained weights of ``model``. It has no frozen parameters, buffers or moments."""

    def __init__(self, model: TrainedModel, chunk_elements: int = CHUNK_ELEMENTS):
        self.model = model
        self.masters = MasterWeights(model)
        self._chunk_elements = chunk_elements
        self._shares = [master.detach().clone() for master in optimizer_shares(model)]
        assert all(share.numel() for share in self._shares), (
            "the master weights are not in memory (offloaded to NVMe?): there is nothing to copy"
        )

    @torch.no_grad()
    def ema_update(self, decay: float) -> None:
        """Computes copy = decay * copy + (1 - decay) * weights. Not a collective."""
        for share, master in zip(self._shares, optimizer_shares(self.model), strict=True):
            share.lerp_(master, 1 - decay)

    @torch.no_grad()
    def copy(self) -> None:
        """Sets the copy to the current weights. Not a collective."""
        for share, master in zip(self._shares, optimizer_shares(self.model), strict=True):
            share.copy_(master)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the engine the copy's weights inside the block, for forwards, generation and export.

        All ranks must call this. Training inside the block is forbidden. After it, the engine's weights are
        bit-identical to those before. After an exception, the master weights are restored at once, and the
        module's weights at the next use of the model (see ``TrainedModel.replaced_weights``).
        """
        assert self.model.module.training, (
            "swapped() inside generation_mode(), which has the weights of its start"
        )
        with self.model.replaced_weights(self.masters.refresh), self.exchanged():
            self.masters.refresh()
            yield
        self.masters.refresh()

    @contextmanager
    def exchanged(self) -> Iterator[MasterWeights]:
        """Swaps the master weights and the copy for the time of the with block. Not a collective.

        The module's own weights do not change.
        """
        self._exchange()
        try:
            yield self.masters
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # in place, because DeepSpeed and torch's optimizer hold views of the master weights
        for share, master in zip(self._shares, optimizer_shares(self.model), strict=True):
            own = share.view(-1).split(self._chunk_elements)
            other = master.detach().view(-1).split(self._chunk_elements)
            for copied, weights in zip(own, other, strict=True):
                previous = copied.clone()
                copied.copy_(weights)
                weights.copy_(previous)
