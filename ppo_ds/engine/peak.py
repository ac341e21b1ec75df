"""What this machine can do at most: its fastest matrix product, and its fastest walk through memory. Measured where the run is, not looked up.

Both take the best of several tries: what another process takes away at a moment does not lower a limit. Not tried on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

GIB = 2**30
GEMM_SHAPES = {"cpu": ((1024, 1024, 1024),), "cuda": ((4096, 4096, 4096), (8192, 8192, 8192))}
BUFFER_BYTES = {
    "cpu": GIB // 8,
    "cuda": GIB,
}  # of each of two buffers; beyond the caches that one core or one GPU has to itself
MIN_TRIES = 3


def gemm_flops_per_s(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int, int]] = (),
    seconds: float = 0.3,
) -> float:
    """FLOPs a second of the fastest product ``[m,k] @ [n,k].T``, with the threads that this process has: a multiplication and an addition are two.

    ``shapes``: (m, k, n) to try beside the device's own, the sizes of a model's layers. ``seconds``: about how long, over all shapes.
    """
    tried = (*GEMM_SHAPES.get(device.type, GEMM_SHAPES["cpu"]), *shapes)
    return max(_gemm(device, dtype, shape, seconds / len(tried)) for shape in tried)


def bytes_per_s(device: torch.device, size: int | None = None, seconds: float = 0.3) -> float:
    """Bytes a second, read and written, over buffers of ``size`` bytes: the faster of a copy and of a matrix times a vector, which only reads."""
    size = size or BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    source = torch.ones(size // 4 // 1024, 1024, device=device)
    target, vector = torch.zeros_like(source), torch.ones(1024, device=device)
    moved = source.numel() * source.element_size()
    copied = 2 * moved / _best_seconds(lambda: target.copy_(source), device, seconds / 2)
    read = moved / _best_seconds(lambda: torch.mv(source, vector), device, seconds / 2)
    return max(copied, read)


def _gemm(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], seconds: float) -> float:
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(
        0
    )  # a GPU is faster with constants than with numbers; the run's random state stays as it is
    x = torch.randn(m, k, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(n, k, device=device, dtype=dtype, generator=generator)
    return 2 * m * k * n / _best_seconds(lambda: torch.nn.functional.linear(x, weight), device, seconds)


def _best_seconds(action: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest run of ``action`` among those that fit in ``seconds``, at least MIN_TRIES; the first, which sets things up, is not counted."""
    action()
    end = _now(device) + seconds
    best, tries = float("inf"), 0
    while tries < MIN_TRIES or _now(device) < end:
        start = _now(device)
        action()
        best, tries = min(best, _now(device) - start), tries + 1
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
