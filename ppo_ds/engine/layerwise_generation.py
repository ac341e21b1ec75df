"""Decoding with the sharded model itself: ZeRO-3's hooks gather each layer as a forward reaches it, and release it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def layer_by_layer(engine: Any, lm: nn.Module, forward_begins: Callable[[], None]) -> Iterator[None]:
    """Inside, ``lm``, which is a part of the DeepSpeed engine's module, may be called by itself, as often on each rank.

    DeepSpeed expects forwards of the engine. What it does around those is done here around those of ``lm``: the record of the order of modules,
    by which it prefetches, starts anew with each forward (else it would grow with every token), and parameters that a module takes from
    another one are noticed. Afterwards all is sharded again, also where an exception has left a forward half way. Not a collective.
    """
    optimizer = engine.optimizer

    def begin(*_: Any) -> None:
        optimizer.parameter_offload.get_param_coordinator().reset_step()
        _notice_external_parameters(lm, True)
        forward_begins()

    def end(*_: Any) -> None:
        _notice_external_parameters(lm, False)

    hooks = [
        lm.register_forward_pre_hook(begin, prepend=True),
        lm.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        optimizer.empty_partition_cache()


def _notice_external_parameters(lm: nn.Module, notice: bool) -> None:
    for module in lm.modules():
        module._parameters._in_forward = notice
