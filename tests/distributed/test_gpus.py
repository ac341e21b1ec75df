"""Tests how a GPU is found that torch cannot use, with stand-ins for /proc, /dev, nvidia-smi and torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from ppo_ds.distributed import gpus
from ppo_ds.distributed.gpus import cpu_requested, find_gpu, reason, refuse_unused_gpu
from ppo_ds.errors import UserError


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the root of a machine without GPUs on which the user has not chosen the CPU."""
    for name in (*gpus.AMD, "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def create(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()


def add_nvidia_smi(root: Path, script: str) -> None:
    create(root, "bin/nvidia-smi")
    (root / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (root / "bin/nvidia-smi").chmod(0o755)


@pytest.mark.parametrize("name", ["proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0", "dev/kfd"])
def test_a_gpu_is_found_by_the_files_of_its_driver(machine: Path, name: str) -> None:
    create(machine, "dev/nvidiactl")  # exists without a GPU too
    create(machine, "proc/driver/nvidia/version")
    assert find_gpu(machine) is None
    refuse_unused_gpu(machine)
    create(machine, name)
    assert find_gpu(machine) == (f"/{name}", gpus.AMD if name == "dev/kfd" else gpus.NVIDIA)


def test_a_gpu_is_found_by_nvidia_smi(machine: Path) -> None:
    add_nvidia_smi(machine, "echo 'No devices were found'; exit 6")
    assert find_gpu(machine) is None
    add_nvidia_smi(machine, "echo 'GPU 0: NVIDIA H100 (UUID: GPU-x)'")
    assert find_gpu(machine) == ("nvidia-smi", gpus.NVIDIA)


def test_a_gpu_that_this_torch_cannot_use_is_an_error_of_one_line(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(machine, "dev/nvidia0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError) as error:
        refuse_unused_gpu(machine)
    assert error.value.problems == [
        "torch 2.13.0+cpu cannot use the GPU of this machine (/dev/nvidia0): this torch is a CPU build; "
        "install a torch that fits the GPU's driver, give a container its GPUs (docker run --gpus all), "
        "request GPUs from Slurm (--gpus-per-node), or set DS_ACCELERATOR=cpu to train on the CPU"
    ]


def test_the_reason_is_the_one_that_torch_gives(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\n Please update it."
        )

    create(machine, "dev/nvidia0")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    too_old = "The NVIDIA driver on your system is too old (found version 11040). Please update it"
    assert reason() == too_old
    with pytest.raises(UserError) as error:
        refuse_unused_gpu(machine)
    (line,) = error.value.problems
    assert re.match(r"CUDA_VISIBLE_DEVICES=7, torch \S+ cannot use the GPU of this machine ", line)
    assert f"(/dev/nvidia0): {too_old}; install " in line


NVIDIA_GPU, AMD_GPU = "dev/nvidia0", "dev/kfd"


@pytest.mark.parametrize(
    ("gpu", "given"),
    [
        (NVIDIA_GPU, {"DS_ACCELERATOR": "cpu"}),
        (NVIDIA_GPU, {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
        (NVIDIA_GPU, {"CUDA_VISIBLE_DEVICES": ""}),
        (NVIDIA_GPU, {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "0"}),
        (AMD_GPU, {"DS_ACCELERATOR": "cpu"}),
        (AMD_GPU, {"CUDA_VISIBLE_DEVICES": ""}),
        (AMD_GPU, {"HIP_VISIBLE_DEVICES": ""}),
        (AMD_GPU, {"ROCR_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_a_user_who_chooses_the_cpu_gets_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, given: dict[str, str]
) -> None:
    create(machine, gpu)
    with pytest.raises(UserError):
        refuse_unused_gpu(machine)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    refuse_unused_gpu(machine)


def test_gpus_are_hidden_by_the_variables_of_their_vendor_only(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(machine, NVIDIA_GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    assert not cpu_requested(dict(os.environ))
    with pytest.raises(UserError, match="^CUDA_VISIBLE_DEVICES=0,1, torch .* cannot use the GPU"):
        refuse_unused_gpu(machine)


@pytest.mark.parametrize(
    ("gpu", "name"), [(NVIDIA_GPU, "CUDA_VISIBLE_DEVICES"), (AMD_GPU, "ROCR_VISIBLE_DEVICES")]
)
def test_a_slurm_job_without_gpus_on_a_gpu_machine_is_refused(
    machine: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, name: str
) -> None:
    monkeypatch.setenv(name, "NoDevFiles")
    refuse_unused_gpu(machine)  # a machine without GPUs trains on the CPU
    create(machine, gpu)
    with pytest.raises(UserError, match=f"^{name}=NoDevFiles, torch .* request GPUs from Slurm"):
        refuse_unused_gpu(machine)


def test_expandable_segments_are_not_used_under_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, expected in (("5.15.167.4-microsoft-standard-WSL2", False), ("6.8.0-45-generic", True)):
        monkeypatch.setattr(gpus.platform, "release", lambda release=release: release)
        assert gpus.supports_expandable_segments() is expected
