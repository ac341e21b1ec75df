"""A model that only scores: the reference and the reward. Replicated, kept in CPU memory between its turns, or sharded by ZeRO-3.

What a model that is trained with adapters was at its start is that model itself, without them: the reference of an actor, the reward model that
a critic began as.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

from ppo_ds.distributed.heartbeat import beat
from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel


class FrozenModel:
    """Forward without gradients. Use it inside ``resident()``, which brings an offloaded replica to the device and takes it back."""

    def __init__(
        self, module: nn.Module, *, world: World, offload: bool, deepspeed_config: dict[str, Any] | None
    ):
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

    @property
    def module(self) -> nn.Module:
        """Without the engine around it."""
        return getattr(self.model, "module", self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        beat()
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
    """What a model with adapters was before its training: the trained engine itself, as it began for the length of a forward.

    No second copy of the weights. Each forward switches off and on for itself, so that the trained model may be called in between.
    """

    def __init__(
        self, trained: TrainedModel, *, as_begun: Callable[[nn.Module], AbstractContextManager[None]]
    ):
        """``as_begun``: inside, the module computes what it did before its training."""
        self.model = trained
        self.device = trained.world.device
        self.moves = False
        self._as_begun = as_begun
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_begun(self.model.module):
            return super().__call__(*args, **kwargs)


def gathered(trained: TrainedModel, module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the parameters of ``module``, a part of ``trained``, are whole on every rank, to be read. A collective."""
    return deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=trained.zero_stage == 3)
