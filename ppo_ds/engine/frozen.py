"""Models that only run forward passes: the reference and the reward model.

A frozen model is replicated on every rank, optionally kept in CPU memory between uses, or sharded by ZeRO-3.
A model that is trained with adapters needs no frozen copy: its initial state is the trained model with the
adapters disabled.
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
    """Model for forward passes without gradients, which must run inside ``resident()``."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        device: torch.device,
        *,
        offloaded: bool = False,
    ):
        """Stores ``module`` and ``forward``, the function that runs it. ``freeze`` creates instances."""
        self.module = module
        self.device = device
        self._forward = forward
        self._offloaded = offloaded
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        beat()
        with torch.no_grad():
            return self._forward(*args, **kwargs)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Moves an offloaded replica to the device for the duration of the block. Blocks may be nested."""
        self._depth += 1
        try:
            if self._offloaded and self._depth == 1:
                self.module.to(self.device)
            yield
        finally:
            self._depth -= 1
            if self._offloaded and self._depth == 0:
                self.module.to("cpu")


def freeze(
    module: nn.Module, *, world: World, offload: bool, deepspeed_config: dict[str, Any] | None
) -> FrozenModel:
    """Makes a FrozenModel of ``module``.

    With ``deepspeed_config`` the model is a ZeRO-3 engine, otherwise a replica on every rank. ``offload``
    keeps a replica in CPU memory between uses. ``offload`` does not apply to an engine, whose config has its
    own offload setting.
    """
    module.eval().requires_grad_(False)
    if deepspeed_config is None:
        offloaded = offload and world.device.type != "cpu"
        module = module if offloaded else module.to(world.device)
        return FrozenModel(module, module, world.device, offloaded=offloaded)
    with world.quiet():
        engine, *_ = deepspeed.initialize(model=module, config=deepspeed_config)
    engine.eval()
    return FrozenModel(engine.module, engine, world.device)


class FrozenBase(FrozenModel):
    """Base model of a model that is trained with adapters, without a second copy of the weights.

    Each forward pass disables the adapters and enables them again, so that the trained model may be called
    between two forward passes.
    """

    def __init__(
        self, trained: TrainedModel, *, base_weights: Callable[[nn.Module], AbstractContextManager[None]]
    ):
        """Stores ``base_weights``, which makes a context where the module computes as before its training."""
        super().__init__(trained.module, trained, trained.world.device)
        self._base_weights = base_weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._base_weights(self.module):
            return super().__call__(*args, **kwargs)
