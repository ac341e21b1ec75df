"""Offload of the optimizer states of an engine during generation: fp32 weights, moments and gradient buffers.

DeepSpeed's own ``offload_states()`` is not used: with ZeRO-3 it accepts only DeepSpeed's FusedAdam (0.19.8),
it removes the links between weights and their fp32 masters, and it runs the garbage collector on each call.
This module empties and refills the storage of each tensor in place. Tensors and their views remain the same
objects, so this works for every ZeRO stage without changes to other code. Not tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, UntypedStorage

from ppo_ds.engine.adamw_8bit import is_8bit
from ppo_ds.engine.host_memory import aligned, lock_pages, unlock_pages
from ppo_ds.engine.master_weights import optimizer_shares
from ppo_ds.engine.trained import TrainedModel


class OptimizerOffload:
    """Moves the optimizer states of ``model`` to a block of page-locked CPU memory and back.

    The block is kept between phases, since its allocation is slow. ZeRO-3's buckets, in which gradients wait
    to be reduced, are empty between two steps, so they are freed without a copy.
    """

    def __init__(self, model: TrainedModel):
        self._model = model
        self._block = torch.empty(0, dtype=torch.uint8)
        self._locked = False  # whether the block is page-locked

    @property
    def bytes(self) -> int:
        """Bytes on the device that can be offloaded; 0 if offload_optimizer keeps the states on the CPU."""
        return sum(storage.nbytes() for storage in (*self._states(), *self._buckets()))

    @property
    def future_bytes(self) -> int:
        """Bytes of the moments that are not allocated on the device yet (before the first step)."""
        optimizer, device = self._model.engine.basic_optimizer, self._model.world.device.type
        fresh = [share for share in optimizer_shares(self._model) if not optimizer.state.get(share)]
        each = 2 if is_8bit(optimizer) else 8  # bytes of both moments of an element
        return sum(each * share.numel() for share in fresh if share.device.type == device)

    @contextmanager
    def offloaded(self) -> Iterator[int]:
        """Offloads the states for the duration of the block; they must not be accessed inside it.

        Yields the number of bytes that were copied. Not a collective.
        """
        copies: list[tuple[UntypedStorage, Tensor]] = []
        buckets = [(storage, storage.nbytes()) for storage in self._buckets()]
        states, used = self._states(), 0
        needed = sum(aligned(storage.nbytes()) for storage in states)
        if len(self._block) < needed:  # at the first use, and when the moments exist
            if self._locked:
                unlock_pages(self._block)
            self._block = torch.empty(0, dtype=torch.uint8)  # frees the old block first
            self._block = torch.empty(needed, dtype=torch.uint8)
            self._locked = lock_pages(self._block, self._model.world.device)
        try:
            for storage in states:
                size = storage.nbytes()
                copy = self._block[used : used + size]
                used += aligned(size)
                copy.copy_(_as_bytes(storage), non_blocking=True)
                copies.append((storage, copy))
                storage.resize_(0)  # takes effect after the copy, which is on the same stream
            for storage, _ in buckets:
                storage.resize_(0)
            get_accelerator().empty_cache()
            yield sum(len(copy) for _, copy in copies)
        finally:
            get_accelerator().empty_cache()  # frees the cached blocks of generation, which have other sizes
            for storage, copy in copies:
                storage.resize_(len(copy))
                _as_bytes(storage).copy_(copy, non_blocking=True)
            for storage, size in buckets:
                storage.resize_(size)
            get_accelerator().synchronize()  # because gradients are reduced on another stream

    def _states(self) -> list[UntypedStorage]:
        """Returns the storages of optimizer states, except those that forwards need.

        Without ZeRO, the optimizer updates the module's own weights, which forwards need.
        """
        model, states = self._model, self._model.engine.basic_optimizer.state.values()
        tensors = [
            *optimizer_shares(model),
            *(x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()),
        ]
        if model.zero_stage == 3:
            tensors.append(model.engine.optimizer.grad_partitions_flat_buffer)
        needed = {
            x.untyped_storage().data_ptr()
            for parameter in model.module.parameters()
            for x in (parameter, getattr(parameter, "ds_tensor", parameter))
        }
        return [storage for storage in self._on_device(tensors) if storage.data_ptr() not in needed]

    def _buckets(self) -> list[UntypedStorage]:
        if self._model.zero_stage < 3:
            return []
        buckets = self._model.engine.optimizer.ipg_buckets.values()
        return self._on_device(bucket.buffer for bucket in buckets if bucket.buffer is not None)

    def _on_device(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Returns the non-empty storages of ``tensors`` on the model's device, without duplicates."""
        device = self._model.world.device.type
        storages = [x.untyped_storage() for x in tensors if x.device.type == device]
        return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
