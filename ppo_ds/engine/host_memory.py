"""Blocks of CPU memory that are page-locked, so that copies between them and a GPU are asynchronous.

torch's own allocator of page-locked memory is not used, since it rounds each allocation up to a power of two
(ATen/core/CachingHostAllocator.h). Not tried on a GPU.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes


def aligned(size: int) -> int:
    """Returns the bytes that a tensor of ``size`` bytes takes in a block."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lock_pages(block: Tensor, device: torch.device) -> bool:
    """Page-locks a block that is copied to or from ``device``; returns whether this succeeded.

    The block must not be freed before ``unlock_pages``. Only GPUs need locked pages. Warns on failure.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    portable = 1  # cudaHostRegisterPortable: for all CUDA contexts
    error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, portable))
    if error:
        log.warning(
            "%.3g GB of host memory for an offloaded model cannot be page-locked (CUDA error %d): its copies "
            "to the GPU are slower",
            block.nbytes / 1e9,
            error,
        )
        with suppress(RuntimeError):  # CUDA reports the error once more, after the next kernel
            torch.zeros(1, device=device)
    return not error


def unlock_pages(block: Tensor) -> None:
    """Unlocks the pages of a block that ``lock_pages`` has locked. All copies must be complete."""
    error = int(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))
    assert error == 0, f"cudaHostUnregister failed with CUDA error {error}"
