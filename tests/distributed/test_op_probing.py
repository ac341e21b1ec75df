"""Tests that no rank runs compilers to find out which of DeepSpeed's ops it could build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT, environment

# Simulates a GPU machine: DeepSpeed uses its CUDA accelerator, and probing an op calls nvcc of CUDA_HOME.
# gloo replaces NCCL.
WORKER = """
import json, os, sys
started = []
def hook(event, values):
    if event == "subprocess.Popen":
        started.append(str(values[0]))
sys.addaudithook(hook)
import torch
import torch.utils.cpp_extension
torch.version.cuda = "12.8"
torch.utils.cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]  # torch's builds for CPUs ignore it
import deepspeed
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda device=None: type("Properties", (), {"major": 9, "minor": 0})
from ppo_ds.distributed import world
if sys.argv[1] == "connect":
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by connect(); DeepSpeed has chosen its accelerator before
    world.connect(timeout_minutes=5)
else:
    deepspeed.ops.__compatible_ops__
print(json.dumps({"accelerator": deepspeed.get_accelerator()._name, "started": started}))
os._exit(0)
"""


def started(folder: Path, action: str) -> list[str]:
    """Returns the programs that a process starts; ``action`` is connect or probe."""
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    path = f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", WORKER, action],
        cwd=ROOT,
        env=environment(CUDA_HOME=str(folder / "cuda"), PATH=path, DS_ACCELERATOR="cuda"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["accelerator"] == "cuda"
    return found["started"]


@pytest.mark.slow
def test_a_rank_does_not_probe_the_ops_of_deepspeed(tmp_path: Path) -> None:
    counts = {
        action: sum(program.endswith("/nvcc") for program in started(tmp_path / action, action))
        for action in ("connect", "probe")
    }
    assert counts["connect"] == 0 and counts["probe"] > 5
