"""Memory: settings of the C library for tensors on the CPU, and detection of out-of-memory errors."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform

import torch
from torch.distributed import DistError

# parameters of mallopt, from malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for later allocations. Returns False with another C library.

    By default glibc returns freed blocks of more than a few MB to the kernel at once, so the tensors of each
    step are allocated on new pages, each of which the kernel must clear and map. This took a tenth or more of
    a training step on a CPU when measured. Now the process keeps the memory; its peak is unchanged.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**30) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` means that torch, or a library that itself allocates memory, ran out of it.

    NCCL (with a DistBackendError), cuBLAS and vLLM raise a RuntimeError, which is recognized by its text.
    """
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    in_library = isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    return in_library or isinstance(error, torch.OutOfMemoryError)


def is_broken_group(error: BaseException) -> bool:
    """Returns whether ``error`` is that of a failed collective, whose process group can no longer be used."""
    return isinstance(error, DistError)
