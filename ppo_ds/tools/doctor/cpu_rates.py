"""Measures the rates of this machine's CPU for the sizes of a model."""

from __future__ import annotations

import os

import torch

from ppo_ds.compute.sizes import Shape
from ppo_ds.distributed.threads import own_cores, share, user_limit
from ppo_ds.engine.peak import Clock, bytes_per_s, gemm_flops_per_s
from ppo_ds.tools.doctor.gpus import Device

ROWS = 2048  # tokens of a product
BUFFER = 2**26  # bytes of each of the two buffers that measure the memory
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cpu_device(
    shape: Shape, dtype: str, ranks: int, threads: int | None, clock: Clock | None = None
) -> Device:
    """Measures matrix products of a model's sizes and the memory, with the threads of one of ``ranks`` ranks.

    Takes about half a second. ``threads`` is run.threads; ``clock`` is time.perf_counter by default. The
    links between ranks are assumed to have a quarter of the memory's bandwidth; they are not measured.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(share(0, [own_cores()] * ranks, threads, user_limit(os.environ)).each)
    try:
        cpu = torch.device("cpu")
        sizes = [(ROWS, shape.hidden, shape.inner), (ROWS, shape.inner, shape.hidden)]
        flops = gemm_flops_per_s(cpu, DTYPES[dtype], sizes, clock=clock) / 1e12
        memory = bytes_per_s(cpu, BUFFER, clock=clock) / 1e9
    finally:
        torch.set_num_threads(before)
    link = memory / 4
    return Device("CPU", 0, flops, flops, flops, memory, link, link, link, ranks, "measured now")
