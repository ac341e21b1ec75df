"""What an engine keeps for its next optimizer step, out of the way while it generates: fp32 weights, moments, gradient buffers.

DeepSpeed's own ``offload_states()`` is not used: with ZeRO-3 it takes no optimizer but its FusedAdam (0.19.8), it takes apart what links weights to
their fp32 ones, and it collects garbage each time. Here a tensor's storage is emptied and filled again in place: tensors and all views of
them stay what they are, so it fits every stage and nobody has to be told. Not tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, UntypedStorage

from ppo_ds.engine.master_weights import optimizer_shares
from ppo_ds.engine.trained import TrainedModel


class OptimizerOffload:
    """The optimizer's part of ``model``. Its copies on the CPU are pinned, and kept from one time to the next: to allocate them is slow.

    ZeRO-3's buckets, in which gradients wait to be reduced, hold nothing between two steps: they go without a copy.
    """

    def __init__(self, model: TrainedModel):
        self._model = model
        self._copies: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """That could move: on the model's device now. What is offloaded (``offload_optimizer``) is not."""
        return sum(storage.nbytes() for storage in (*self._kept(), *self._buckets()))

    @property
    def bytes_to_come(self) -> int:
        """Of moments that torch makes in the first step."""
        state = self._model.engine.basic_optimizer.state
        fresh = [share for share in optimizer_shares(self._model) if not state.get(share)]
        return sum(2 * share.nbytes for share in fresh if share.device.type == self._model.world.device.type)

    @contextmanager
    def offloaded(self) -> Iterator[int]:
        """Inside, none of it takes room on the device, and nothing may read it; gives how many bytes were copied. Not a collective."""
        copies: list[tuple[UntypedStorage, Tensor]] = []
        buckets = [(storage, storage.nbytes()) for storage in self._buckets()]
        try:
            for i, storage in enumerate(self._kept()):
                copy = self._copy(i, storage)
                copy.copy_(_as_bytes(storage), non_blocking=True)
                copies.append((storage, copy))
                storage.resize_(0)  # ordered behind the copy, as both are on the same stream
            for storage, _ in buckets:
                storage.resize_(0)
            get_accelerator().empty_cache()
            yield sum(len(copy) for _, copy in copies)
        finally:
            get_accelerator().empty_cache()  # what generation took is in pieces of other sizes
            for storage, copy in copies:
                storage.resize_(len(copy))
                _as_bytes(storage).copy_(copy, non_blocking=True)
            for storage, size in buckets:
                storage.resize_(size)
            get_accelerator().synchronize()  # gradients are reduced on a stream of their own

    def _copy(self, i: int, storage: UntypedStorage) -> Tensor:
        if i == len(self._copies):
            self._copies.append(torch.empty(0, dtype=torch.uint8))
        if len(self._copies[i]) != storage.nbytes():
            self._copies[i] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            )
        return self._copies[i]

    def _kept(self) -> list[UntypedStorage]:
        """Without what forwards need: where there is no ZeRO, fp32 weights are what the optimizer steps."""
        model, states = self._model, self._model.engine.basic_optimizer.state.values()
        held = [
            *optimizer_shares(model),
            *(x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()),
        ]
        if model.zero_stage == 3:
            held.append(model.engine.optimizer.grad_partitions_flat_buffer)
        needed = {
            x.untyped_storage().data_ptr()
            for p in model.module.parameters()
            for x in (p, getattr(p, "ds_tensor", p))
        }
        return [storage for storage in self._on_device(held) if storage.data_ptr() not in needed]

    def _buckets(self) -> list[UntypedStorage]:
        if self._model.zero_stage < 3:
            return []
        return self._on_device(
            bucket.buffer
            for bucket in self._model.engine.optimizer.ipg_buckets.values()
            if bucket.buffer is not None
        )

    def _on_device(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Each storage once; what is offloaded is elsewhere, or has none."""
        device = self._model.world.device.type
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.device.type == device
        }
        return [storage for storage in storages.values() if storage.nbytes()]


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
