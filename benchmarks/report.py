"""Computes figures from the records of a run, and formats them as a table."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.counting import Lengths, Sizes, decode_traffic, phase_flops

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """Measured limits of one rank's device."""

    gemm_flops_per_s: float
    bytes_per_s: float


def figures(records: Sequence[Record], steps: Sequence[Lengths], cpu: Sequence[float]) -> dict[str, Any]:
    """Computes the figures of the measured steps; seconds are medians over steps.

    ``records`` are lines of metrics.jsonl; ``steps`` and ``cpu`` hold lengths and CPU seconds of the same
    steps.
    """
    per_step = [
        {name: value for name, value in record.items() if name.startswith("time/")} for record in records
    ]
    seconds = {
        name: median(step.get(name, 0.0) for step in per_step)
        for name in dict.fromkeys(name for step in per_step for name in step)
    }
    samples, step_seconds = len(steps[0].prompts), seconds["time/step"]
    kept = {
        name: median(r[name] for r in records)
        for name in records[0]
        if "pad_frac" in name or name.startswith(("mem/", "perf/"))
    }
    return {
        "steps": len(records),
        "samples_per_step": samples,
        "prompt_tokens_mean": _mean([n for step in steps for n in step.prompts]),
        "response_tokens_mean": _mean([n for step in steps for n in step.responses]),
        "seconds": seconds,
        "seconds_per_step": per_step,
        "cpu_seconds": list(cpu),
        "samples_per_s": samples / step_seconds,
        "tokens_per_s": median(sum(step.totals) for step in steps) / step_seconds,
        "new_tokens_per_s": median(sum(step.responses) for step in steps) / step_seconds,
        "metrics": kept,
    }


def limit_fractions(
    found: Record, steps: Sequence[Lengths], sizes: Sizes, epochs: Sequence[float], limits: Limits, ranks: int
) -> dict[str, Any]:
    """Computes the fraction of the peak FLOP/s in each phase, and of the memory bandwidth in decoding.

    ``epochs`` holds the number of epochs that the update of each step ran.
    """
    times = found["seconds_per_step"]
    flops = [phase_flops(sizes, step, n) for step, n in zip(steps, epochs, strict=True)]
    peak, bandwidth = limits.gemm_flops_per_s * ranks, limits.bytes_per_s * ranks
    phases = [name for name in flops[0] if found["seconds"].get(name, 0) > 0]
    reached = {
        name: median(f[name] / t[name] / peak for f, t in zip(flops, times, strict=True)) for name in phases
    }
    whole = median(
        sum(f[name] for name in phases) / t["time/step"] / peak for f, t in zip(flops, times, strict=True)
    )
    decoded = [
        decode_traffic(sizes, step, ranks) / t["time/generate"] / bandwidth
        for step, t in zip(steps, times, strict=True)
    ]
    return {
        "limits": {
            "gemm_flops_per_s": limits.gemm_flops_per_s,
            "bytes_per_s": limits.bytes_per_s,
            "ranks": ranks,
        },
        "mfu": {**reached, "time/step": whole},
        "decode_bandwidth_fraction": median(decoded),
    }


def machine(device: str, threads: int, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "device": device,
        "processor": _processor(),
        "threads": threads,
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def table(found: Record) -> str:
    """Formats the main figures; the JSON file has all of them."""
    seconds, mfu = found["seconds"], found.get("mfu", {})
    step = seconds["time/step"]
    lines = [
        f"{found['workload']}: {found['samples_per_step']} samples per step, prompts of "
        f"{found['prompt_tokens_mean']:.1f} tokens, responses of {found['response_tokens_mean']:.1f} on "
        f"average; median of {found['steps']} steps",
        ", ".join(f"{name} {value}" for name, value in found["machine"].items()),
        "",
        f"{'phase':<16}{'seconds':>10}{'share':>8}{'MFU':>8}",
    ]
    for name in sorted(seconds, key=lambda name: (name == "time/step", -seconds[name])):
        reached = f"{100 * mfu[name]:.1f} %" if name in mfu else ""
        lines.append(
            f"{name.removeprefix('time/'):<16}{seconds[name]:>10.3f}"
            f"{100 * seconds[name] / step:>6.0f} %{reached:>8}"
        )
    rows = {
        "samples/s": found["samples_per_s"],
        "tokens/s": found["tokens_per_s"],
        "new tokens/s": found["new_tokens_per_s"],
        **{
            name: value
            for name, value in found["metrics"].items()
            if "pad_frac" in name or name.startswith("mem/")
        },
    }
    lines += ["", *(f"{name:<32}{value:>12.3f}" for name, value in rows.items())]
    if "limits" in found:
        limits = found["limits"]
        lines += [
            f"{'GEMM peak, GFLOP/s per rank':<32}{limits['gemm_flops_per_s'] / 1e9:>12.1f}",
            f"{'memory, GB/s per rank':<32}{limits['bytes_per_s'] / 1e9:>12.1f}",
            f"{'decode, of that bandwidth':<32}{100 * found['decode_bandwidth_fraction']:>10.1f} %",
        ]
    return "\n".join(lines)
