"""Detection of bf16 instructions of the processor."""

from __future__ import annotations

from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel since Cooper Lake, AMD since Zen 4; bf16: ARM


def computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Returns whether the processor multiplies bf16 matrices in hardware; None if unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = [
        set(line.partition(":")[2].split())
        for line in lines
        if line.split(":")[0].strip() in ("flags", "Features")
    ]
    return any(BF16_FLAGS & words for words in flags) if flags else None
