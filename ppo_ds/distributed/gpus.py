"""Finds the GPUs of this machine without torch, and the reason why torch cannot use them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ppo_ds.errors import UserError

# Variables that hide GPUs from torch, by vendor; ROCm also reads CUDA's variable.
NVIDIA = ("CUDA_VISIBLE_DEVICES",)
AMD = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# NVIDIA's driver lists its GPUs in /proc, also inside a container that was started without them.
TRACES = {"proc/driver/nvidia/gpus/*": NVIDIA, "dev/nvidia[0-9]*": NVIDIA, "dev/kfd": AMD}
HIDDEN = {"", "-1"}
NOT_REQUESTED = "NoDevFiles"  # set by Slurm for a job that has requested no GPUs
NVIDIA_SMI_SECONDS = 30.0


class Gpu(NamedTuple):
    """A GPU of this machine."""

    trace: str  # file or command that shows it
    variables: tuple[str, ...]  # variables that hide GPUs of its vendor


def cpu_requested(environment: Mapping[str, str], variables: Iterable[str] = NVIDIA) -> bool:
    """Returns whether the user has chosen the CPU, with DS_ACCELERATOR or by hiding all GPUs.

    ``variables`` are the environment variables that hide GPUs of this machine's vendor; others are ignored.
    """
    hidden = any(environment.get(name, "0").strip() in HIDDEN for name in variables)
    return hidden or environment.get("DS_ACCELERATOR") == "cpu"


def find_gpu(root: Path = Path("/")) -> Gpu | None:
    """Returns a GPU of this machine, or None if there is none."""
    for pattern, variables in TRACES.items():
        for path in root.glob(pattern):
            return Gpu(f"/{path.relative_to(root)}", variables)
    return Gpu("nvidia-smi", NVIDIA) if nvidia_gpus() else None  # under WSL there is only nvidia-smi


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

    Callers must first check that torch can use no GPU. Without this error, the run would train on the CPU.
    """
    if cpu_requested(os.environ, variables=()):
        return
    gpu = find_gpu(root)
    if gpu is None or cpu_requested(os.environ, gpu.variables):
        return
    import torch

    given = "".join(f"{name}={os.environ[name]}, " for name in gpu.variables if name in os.environ)
    raise UserError(
        f"{given}torch {torch.__version__} cannot use the GPU of this machine ({gpu.trace}): {reason()}; "
        "install a torch that fits the GPU's driver, give a container its GPUs (docker run --gpus all), "
        "request GPUs from Slurm (--gpus-per-node), or set DS_ACCELERATOR=cpu to train on the CPU"
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
    """Returns whether torch may use expandable segments; False under WSL, where allocations in them can fail.

    See https://github.com/pytorch/pytorch/issues/192330.
    """
    return "microsoft" not in platform.release().lower()
