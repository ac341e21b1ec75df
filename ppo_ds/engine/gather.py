"""Gathering of parameters that ZeRO-3 has partitioned, in chunks of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import deepspeed
from torch import nn

from ppo_ds.engine.trained import TrainedModel

T = TypeVar("T")
# elements gathered per collective: enough to use the bandwidth of the links, few compared with a large model
GATHER_ELEMENTS = 100_000_000


def chunked(items: Iterable[T], numel: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Splits ``items`` in order into lists; a list ends once its items have ``limit`` elements in total."""
    chunk: list[T] = []
    elements = 0
    for item in items:
        chunk.append(item)
        elements += numel(item)
        if elements >= limit:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk


def gathered(trained: TrainedModel, module: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which the parameters of ``module`` are whole on every rank.

    All ranks must call this. ``module`` is a part of the model ``trained``.
    """
    return deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=trained.zero_stage == 3)
