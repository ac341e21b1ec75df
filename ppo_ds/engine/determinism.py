"""Deterministic algorithms of torch in backward passes (run.deterministic)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Makes torch use deterministic algorithms inside the block if ``enabled``.

    On a GPU, the backward passes of attention and of embeddings add with atomic operations, whose order
    differs from run to run. An operation without a deterministic algorithm raises RuntimeError, which names
    it. torch would also fill new memory with NaN, which is slow and not needed here.

    Only backward passes run in such a block: torch refuses the cumulative sums of top_p sampling on a GPU,
    although those over rows do not depend on an order (torch 2.13, ``use_deterministic_algorithms``).
    """
    if not enabled:
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills
