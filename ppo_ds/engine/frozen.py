"""A model that only scores: the reference and the reward. Replicated, kept in CPU memory between its turns, or sharded by ZeRO-3.

The reference of a model that is trained with adapters is that model itself, without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.world import World


class FrozenModel:
    """Forward without gradients. Use it inside ``resident()``, which brings an offloaded replica to the device and takes it back."""

    def __init__(self, module: nn.Module, *, world: World, offload: bool, deepspeed_config: dict[str, Any] | None):
        """``deepspeed_config`` is that of a ZeRO-3 engine; None keeps a whole replica on every rank."""
        module.eval().requires_grad_(False)
        self.device = world.device
        self.moves = offload and deepspeed_config is None and world.device.type != "cpu"
        if deepspeed_config is None:
            self.model = module if self.moves else module.to(world.device)
        else:
            with world.quiet():
                self.model, *_ = deepspeed.initialize(model=module, config=deepspeed_config)
            self.model.eval()
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.model(*args, **kwargs)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """On the device for the length of the block; does nothing for replicas that live there and for sharded ones."""
        self._depth += 1
        try:
            if self.moves and self._depth == 1:
                self.model.to(self.device)
            yield
        finally:
            self._depth -= 1
            if self.moves and self._depth == 0:
                self.model.to("cpu")


class FrozenBase(FrozenModel):
    """What a model with adapters was before its training: the trained engine itself, with the adapters off for the length of a forward.

    No second copy of the weights. Each forward switches off and on for itself, so that the trained model may be called in between.
    """

    def __init__(self, trained: TrainedModel, *, without_adapters: Callable[[nn.Module], AbstractContextManager[None]]):
        self.model = trained
        self.device = trained.world.device
        self.moves = False
        self._without_adapters = without_adapters
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_adapters(self.model.module):
            return super().__call__(*args, **kwargs)
