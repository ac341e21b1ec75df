"""Reads the files of runs that tests compare bit by bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ppo_ds.tracking.jsonl import read_metrics

UNCOMPARED = re.compile("(time|perf|mem)/|time$|health/rank_time_spread_s")  # may differ between equal runs


def compared(run_dir: Path, *leave_out: str) -> list[dict[str, Any]]:
    """Returns the metrics of each step that are equal for equal runs."""
    return [
        {name: value for name, value in line.items() if not UNCOMPARED.match(name) and name not in leave_out}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the weights and moments of all models of a checkpoint, with weight copies and buffers."""
    files = [file for file in sorted(folder.rglob("*.safetensors")) if not file.name.startswith("rng")]
    return {
        f"{file.parent.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }
