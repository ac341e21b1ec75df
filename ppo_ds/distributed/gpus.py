"""GPUs of this machine, found without torch, and torch's reason why it cannot use them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ppo_ds.errors import UserError

# NVIDIA's driver lists its GPUs in /proc, also inside a container that was started without them.
TRACES = ("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*", "dev/kfd")  # dev/kfd: AMD
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NO_DEVICES = {"", "-1", "NoDevFiles"}  # NoDevFiles: set by Slurm for a job without GPUs
NVIDIA_SMI_SECONDS = 30.0


def cpu_requested(environment: Mapping[str, str]) -> bool:
    """Returns whether the user has chosen the CPU, with DS_ACCELERATOR or by hiding all GPUs."""
    hidden = any(environment.get(name, "0").strip() in NO_DEVICES for name in VISIBLE)
    return hidden or environment.get("DS_ACCELERATOR") == "cpu"


def find_gpu(root: Path = Path("/")) -> str | None:
    """Returns a file or a command that shows that this machine has a GPU, or None if there is none."""
    for pattern in TRACES:
        for path in root.glob(pattern):
            return f"/{path.relative_to(root)}"
    return "nvidia-smi" if nvidia_gpus() else None  # under WSL there is only nvidia-smi


def nvidia_gpus() -> int:
    """Returns the number of GPUs that nvidia-smi lists; 0 if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def refuse_unused_gpu(root: Path = Path("/")) -> None:
    """Raises UserError if this machine has a GPU and the user has not chosen the CPU.

    Called when torch finds no GPU that it can use, since the run would otherwise train on the CPU.
    """
    if cpu_requested(os.environ):
        return
    found = find_gpu(root)
    if found is None:
        return
    import torch

    given = "".join(f"{name}={os.environ[name]}, " for name in VISIBLE if name in os.environ)
    raise UserError(
        f"{given}torch {torch.__version__} cannot use the GPU of this machine ({found}): {reason()}; install "
        "a torch that fits the GPU's driver, give a container its GPUs (docker run --gpus all), or set "
        "DS_ACCELERATOR=cpu to train on the CPU"
    )


def reason() -> str:
    """Returns in one line why torch finds no GPU, in torch's words if it gives a reason."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is a CPU build"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return "torch.cuda.is_available() is False"


def supports_expandable_segments() -> bool:
    """Returns whether torch's expandable segments may be used. Under WSL allocations with them can fail.

    See https://github.com/pytorch/pytorch/issues/192330.
    """
    return "microsoft" not in platform.release().lower()
