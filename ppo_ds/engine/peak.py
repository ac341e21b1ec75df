"""Peak rates of this machine, measured at start-up: matrix products and memory bandwidth.

Each rate is the best of several measurements, so that brief work of other programs does not lower it. Not
tested on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ppo_ds.compute import matmul

GIB = 2**30
GEMM_SHAPES = {"cpu": ((1024, 1024, 1024),), "cuda": ((4096, 4096, 4096), (8192, 8192, 8192))}
# size of each of two buffers, larger than the caches of one core or one GPU
BUFFER_BYTES = {"cpu": GIB // 8, "cuda": GIB}
MIN_TRIES = 3
Clock = Callable[[], float]


def gemm_flops_per_s(
    device: torch.device,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int, int]] = (),
    seconds: float = 0.3,
    clock: Clock | None = None,
) -> float:
    """Measures the FLOPs per second of the fastest product ``[m,k] @ [n,k].T`` with this process's threads.

    A multiplication and an addition are two FLOPs. ``shapes`` are tuples (m, k, n) to try in addition to
    GEMM_SHAPES, such as those of a model's layers. ``seconds`` is the approximate total time.
    """
    tried = (*GEMM_SHAPES.get(device.type, GEMM_SHAPES["cpu"]), *shapes)
    rates = []
    for m, k, n in tried:
        # random numbers, since a GPU is faster with constants; a separate generator leaves the run's random
        # state unchanged
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(m, k, device=device, dtype=dtype, generator=generator)
        weight = torch.randn(n, k, device=device, dtype=dtype, generator=generator)
        product = partial(matmul.linear, x, weight)
        shortest = best_seconds(product, seconds / len(tried), clock or device_clock(device))
        rates.append(2 * m * k * n / shortest)
    return max(rates)


def bytes_per_s(
    device: torch.device, size: int | None = None, seconds: float = 0.3, clock: Clock | None = None
) -> float:
    """Measures the bytes read and written per second over buffers of ``size`` bytes.

    Returns the higher rate of a copy and of a matrix-vector product, which only reads.
    """
    clock = clock or device_clock(device)
    size = size or BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    source = torch.ones(size // 4 // 1024, 1024, device=device)
    target, vector = torch.zeros_like(source), torch.ones(1024, device=device)
    buffer_bytes = source.numel() * source.element_size()
    copied = 2 * buffer_bytes / best_seconds(lambda: target.copy_(source), seconds / 2, clock)
    read = buffer_bytes / best_seconds(lambda: torch.mv(source, vector), seconds / 2, clock)
    return max(copied, read)


def best_seconds(action: Callable[[], object], seconds: float, clock: Clock) -> float:
    """Repeats ``action`` for ``seconds``, at least MIN_TRIES times, and returns its shortest duration."""
    action()
    end = clock() + seconds
    best, tries = float("inf"), 0
    while tries < MIN_TRIES or clock() < end:
        start = clock()
        action()
        best, tries = min(best, clock() - start), tries + 1
    return best


def device_clock(device: torch.device) -> Clock:
    """Returns a clock that waits for the device's queued work before it reads the time."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
