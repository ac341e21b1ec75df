"""A second set of an engine's trained weights: the running average of a policy, or a copy that lags behind it.

Each rank keeps its own share in fp32, as the optimizer keeps its masters, so following them takes no communication and is the same on
every ZeRO stage. (Averaging the module's parameters instead does nothing with ZeRO-3, where they are empty between forwards, and loses
small changes in 16 bit.) Whoever wants to use the second set exchanges it with the first and runs the ordinary code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ppo_ds.engine.master_weights import MasterWeights
from ppo_ds.engine.trained import TrainedModel

CHUNK_ELEMENTS = 16 * 1024**2  # of an exchange: 64 MiB beside the two sets


class WeightCopy:
    """Starts as a copy of what ``model`` trains. Frozen parameters, buffers and the optimizer's moments are not part of it."""

    def __init__(self, model: TrainedModel):
        self.model = model
        self.masters = MasterWeights(model)
        self._shares = [master.clone() for master in self._master_shares()]
        assert all(share.numel() for share in self._shares), (
            "the masters are not in memory (on NVMe?): there is nothing to copy"
        )

    @torch.no_grad()
    def ema_update(self, decay: float) -> None:
        """shadow = decay * shadow + (1 - decay) * weights. Not a collective."""
        for share, master in zip(self._shares, self._master_shares(), strict=True):
            share.lerp_(master, 1 - decay)

    def copy(self) -> None:
        """shadow = weights. Not a collective."""
        for share, master in zip(self._shares, self._master_shares(), strict=True):
            share.copy_(master)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Collective: inside, the engine's weights are the shadow's, for forwards, generation and export; nothing may train them.

        Afterwards every bit is what it was. An exception may be one rank's alone, and the others would never join in a collective:
        then the masters change back at once, and the weights of the module follow when the model is next used.
        """
        model = self.model
        assert not model.swapped, "swapped() inside swapped()"
        assert model.module.training, (
            "swapped() goes around generation_mode(), which has its weights from where it began"
        )
        model.settle()
        model.swapped = True
        try:
            with self.exchanged():
                self.masters.refresh()
                yield
        except BaseException:
            model.unsettled = self.masters.refresh
            raise
        finally:
            model.swapped = False
        self.masters.refresh()

    @contextmanager
    def exchanged(self) -> Iterator[MasterWeights]:
        """Inside, the masters hold the shadow's weights and the shadow holds theirs; the module's own stay. Not a collective."""
        self._exchange()
        try:
            yield self.masters
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """In place: DeepSpeed and torch's optimizer have views of the masters."""
        for share, master in zip(self._shares, self._master_shares(), strict=True):
            for mine, theirs in zip(
                share.view(-1).split(CHUNK_ELEMENTS), master.view(-1).split(CHUNK_ELEMENTS), strict=True
            ):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)

    def _master_shares(self) -> list[Tensor]:
        return [master.detach() for master in self.masters.held_by_optimizer()]
