"""What the C library does with memory that a tensor on the CPU has given back."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform

# mallopt's names, from malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensor; whether it could be asked.

    By default it gives blocks of more than some MB back to the kernel at once, and each step's tensors then begin as new pages that
    the kernel has to clear and map, one fault each: measured, a tenth and more of a training step on a CPU. What is freed and not used again
    stays with the process, whose peak is the same.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**30) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
