"""Decoding with a model that ZeRO-3 has sharded: hooks gather and release each layer in each forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def layer_by_layer(offload: Any, lm: nn.Module, on_forward: Callable[[], None]) -> Iterator[None]:
    """Allows forwards of ``lm``, a submodule of a DeepSpeed engine's module, inside the block.

    ``offload`` is the engine's DeepSpeedZeRoOffload. ``on_forward`` is called before each forward. Entering
    and leaving the block communicate nothing; the forwards do, so all ranks must run the same number of them.
    After the block, even after an exception, all parameters are sharded again.
    """
    # DeepSpeed supports only forwards of the engine, so hooks on ``lm`` repeat what the engine does around
    # its own forwards.

    def set_in_forward(value: bool) -> None:
        for module in lm.modules():
            # if True, DeepSpeed gathers parameters that one module owns and another module uses
            module._parameters._in_forward = value

    def before_forward(*_: Any) -> None:
        # restarts the trace of modules, which is used for prefetching and would grow with every token
        offload.get_param_coordinator().reset_step()
        set_in_forward(True)
        on_forward()

    hooks = [
        lm.register_forward_pre_hook(before_forward, prepend=True),
        lm.register_forward_hook(lambda *_: set_in_forward(False), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        offload.empty_partition_cache()
