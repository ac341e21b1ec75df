"""What this machine's processor has instructions for."""

from __future__ import annotations

from pathlib import Path

_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Intel and AMD from Cooper Lake and Zen 4 on; ARM


def computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether it multiplies bf16 matrices itself; None where the system does not tell (only Linux does)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    flags = [
        set(line.partition(":")[2].split())
        for line in lines
        if line.split(":")[0].strip() in ("flags", "Features")
    ]
    return any(_BF16 & words for words in flags) if flags else None
