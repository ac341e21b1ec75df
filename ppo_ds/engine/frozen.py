"""Models that only run forward passes: the reference and the reward model.

A frozen model is replicated on every rank, optionally kept in CPU memory between uses, or sharded by ZeRO-3.
Ranks of a node do not share a copy in CPU memory; each rank has its own. A model that is trained with
adapters needs no frozen copy: its initial state is the trained model with the adapters disabled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ppo_ds.distributed.heartbeat import beat
from ppo_ds.distributed.world import World
from ppo_ds.engine.host_memory import aligned, lock_pages
from ppo_ds.engine.layerwise_generation import layer_by_layer
from ppo_ds.engine.trained import TrainedModel


class HostWeights:
    """The parameters of a frozen module in one block of host memory.

    The block is page-locked on a GPU, so that copies from it to the GPU are asynchronous (host_memory.py).
    """

    def __init__(self, module: nn.Module, device: torch.device):
        """Moves the parameters to a new block one by one: at most one parameter is in memory twice."""
        self._slots = [
            (owner, name, parameter)  # a tied parameter has several slots
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        ]
        offsets, size = {}, 0
        for _, _, parameter in self._slots:
            if parameter not in offsets:
                offsets[parameter] = size
                size += aligned(parameter.nbytes)
        block = torch.empty(size, dtype=torch.uint8)
        self._host: dict[nn.Parameter, Tensor] = {}
        for parameter, offset in offsets.items():
            host = block[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            self._host[parameter] = host.copy_(parameter.data)
            parameter.data = host
        lock_pages(block, device)

    def restore(self) -> None:
        """Points the parameters to the host memory again, without a copy, which frees them on the device."""
        for owner, name, parameter in self._slots:
            parameter.data = self._host[parameter]
            setattr(owner, name, parameter)  # Module.to replaces parameters of some devices


@dataclass(eq=False)
class FrozenModel:
    """Model for forward passes without gradients. Forwards must run inside ``resident()``. See ``freeze``."""

    module: Any
    forward: Callable[..., Any]  # runs the module
    device: torch.device
    _: KW_ONLY
    offloaded: bool = False
    sharding: Any = None  # the DeepSpeedZeRoOffload of a module that ZeRO-3 has sharded

    def __post_init__(self) -> None:
        self._host = HostWeights(self.module, self.device) if self.offloaded else None
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        beat()
        with torch.no_grad():
            return self.forward(*args, **kwargs)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Copies an offloaded replica to the device for the duration of the block. Blocks may be nested.

        Small buffers, which forwards may change (RoPE with a dynamic length), stay on the device.
        """
        self._depth += 1
        try:
            if self._host and self._depth == 1:
                self.module.to(self.device, non_blocking=True)
            yield
        finally:
            self._depth -= 1
            if self._host and self._depth == 0:
                self._host.restore()

    @contextmanager
    def decoding(self) -> Iterator[nn.Module]:
        """Yields the causal LM of a frozen policy. Inside the block, its forward may be called directly.

        With ZeRO-3 all ranks must run the same number of forwards.
        """
        lm = self.module.lm
        layers = nullcontext() if self.sharding is None else layer_by_layer(self.sharding, lm, beat)
        with self.resident(), layers:
            yield lm


def freeze(
    module: nn.Module, *, world: World, offload: bool, deepspeed_config: dict[str, Any] | None
) -> FrozenModel:
    """Makes a FrozenModel of ``module``.

    With ``deepspeed_config`` the model is a ZeRO-3 engine, and that config decides about offload. Otherwise
    it is a replica on every rank, which ``offload`` keeps in CPU memory between uses.
    """
    module.eval().requires_grad_(False)
    if deepspeed_config is None:
        offloaded = offload and world.device.type != "cpu"
        module = module if offloaded else module.to(world.device)
        return FrozenModel(module, module, world.device, offloaded=offloaded)
    with world.quiet():
        engine, *_ = deepspeed.initialize(model=module, config=deepspeed_config)
    engine.eval()
    return FrozenModel(engine.module, engine, world.device, sharding=engine.optimizer)


class FrozenBase(FrozenModel):
    """Base model of a model that is trained with adapters, without a second copy of the weights.

    Adapters are disabled only during a forward, so that the trained model may be called between two forwards.
    """

    def __init__(
        self, trained: TrainedModel, *, base_weights: Callable[[nn.Module], AbstractContextManager[None]]
    ):
        """Wraps ``trained``. Inside ``base_weights(module)``, the module computes as before training."""
        super().__init__(trained.module, trained, trained.world.device)
        self._base_weights = base_weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._base_weights(self.module):
            return super().__call__(*args, **kwargs)
