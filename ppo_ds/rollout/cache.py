"""Preallocated KV cache: each sequence has a slot, and each slot has a separate position.

transformers' StaticCache writes all rows of a batch at one position; this cache writes each row at a separate
one. A forward gets views of the rows and columns in use, so that free slots and positions cost nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

Prefix = list[tuple[Tensor, Tensor]]  # per layer: keys and values [c,H,P,d] of c prompts


class _SlotLayer(CacheLayerMixin):
    """Keys and values [slots,H,length,d] of one layer, allocated when the first ones arrive."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: SlotCache):
        super().__init__()
        # a strong reference would make a cycle, which only the garbage collector would free
        self.cache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, because a masked column has weight 0, and uninitialised memory can hold NaN: 0 times NaN is
        # not 0.
        shape = (self.cache.slots, key_states.shape[1], self.cache.length)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values [n,H,1,d]; returns all columns in use of these slots, [n,H,columns,d]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n, columns = key_states.shape[0], self.cache.columns
        rows = self.cache.storage_rows(key_states.shape[1])
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored.view(-1, stored.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))
        return self.keys[:n, :, :columns], self.values[:n, :, :columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns, 0

    def get_seq_length(self) -> int:
        return self.cache.columns - 1  # not used by the model, which gets positions and a mask

    def get_max_length(self) -> int:
        return self.cache.length


class SlotCache(Cache):
    """Cache of ``slots`` sequences of at most ``length`` tokens each, in ``layers`` layers."""

    def __init__(self, layers: int, slots: int, length: int):
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])
        self.slots = slots
        self.length = length
        self.columns = 0
        self._positions: Tensor | None = None
        self._storage_rows: dict[int, Tensor] = {}  # by the number of heads

    def at(self, positions: Tensor, columns: int) -> None:
        """Sets the positions [n] of the tokens in the next forward, one token for each of the first n slots.

        All positions must be below ``columns``, the number of columns in use.
        """
        self._positions, self.columns = positions, columns
        self.drop_rows()

    def drop_rows(self) -> None:
        """Drops the ``storage_rows`` of a forward, which would keep a CUDA graph's pool from being freed."""
        self._storage_rows.clear()

    def storage_rows(self, heads: int) -> Tensor:
        """Returns the rows [n * heads] at which new keys and values are stored, for all layers of a forward.

        The rows are indices into the flat storage [slots * heads * length, d].
        """
        if heads not in self._storage_rows:
            positions = self._positions
            assert positions is not None, "at() comes before the forward"
            starts = torch.arange(len(positions) * heads, device=positions.device).mul_(self.length)
            rows = starts.view(len(positions), heads) + positions[:, None]
            self._storage_rows[heads] = rows.flatten()
        return self._storage_rows[heads]

    def fill(self, prefix: Prefix, rows: Tensor, slots: Tensor) -> None:
        """Copies the prompts ``rows`` of ``prefix`` to the start of ``slots`` (both [m] long).

        Later columns keep their old contents, which are masked until they are overwritten.
        """
        for layer, (keys, values) in zip(self.layers, prefix, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            for stored, new in ((layer.keys, keys), (layer.values, values)):
                stored[:, :, : new.shape[2]].index_copy_(0, slots, new.index_select(0, rows))

    def move(self, sources: Tensor, targets: Tensor, columns: int) -> None:
        """Copies the first ``columns`` columns of ``sources`` to ``targets``, which must be other slots."""
        for layer in self.layers:
            for stored in (layer.keys, layer.values):
                used = stored[:, :, :columns]
                used.index_copy_(0, targets, used.index_select(0, sources))
