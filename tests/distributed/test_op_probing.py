"""Tests that no rank builds ops of DeepSpeed, or runs compilers to find out which it could build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT, environment

# The first argument is what the process does, and the second is DeepSpeed's accelerator. With cuda, a GPU
# machine is simulated, where probing an op calls nvcc of CUDA_HOME; gloo replaces NCCL. With cpu, a stub
# replaces the build of the shared-memory collectives.
WORKER = """
import json, os, sys
from datetime import timedelta
action, accelerator = sys.argv[1:]
started, built = [], []
def hook(event, values):
    if event == "subprocess.Popen":
        started.append(str(values[0]))
sys.addaudithook(hook)
import torch
import torch.utils.cpp_extension
if accelerator == "cuda":
    torch.version.cuda = "12.8"
    torch.utils.cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]  # torch's builds for CPUs ignore it
import deepspeed
if accelerator == "cuda":
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda device=None: type("Properties", (), {"major": 9, "minor": 0})
else:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
    ShareMemCommBuilder.load = lambda self: built.append(self.NAME)
from ppo_ds.distributed import world
if action == "connect":
    os.environ["DS_ACCELERATOR"] = "cpu"  # read by connect(); DeepSpeed has chosen its accelerator before
    world.connect(timeout_minutes=5)
elif accelerator == "cuda":
    deepspeed.ops.__compatible_ops__
else:
    os.environ.update(world.single_process_environment(os.environ))
    world.join_process_group(on_gpu=False, timeout=timedelta(minutes=5))
name = deepspeed.get_accelerator()._name
print(json.dumps({"accelerator": name, "started": started, "built": built}), flush=True)
os._exit(0)
"""


def run(folder: Path, action: str, accelerator: str) -> dict[str, list[str]]:
    """Returns the programs that a process starts and the ops that it builds.

    ``action`` is connect or probe. The latter reads DeepSpeed's table of ops, on a CPU by joining the process
    group without what ``connect`` does before.
    """
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    path = f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", WORKER, action, accelerator],
        cwd=ROOT,
        env=environment(CUDA_HOME=str(folder / "cuda"), PATH=path, DS_ACCELERATOR=accelerator),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["accelerator"] == accelerator
    return found


@pytest.mark.slow
def test_a_rank_does_not_probe_the_ops_of_deepspeed(tmp_path: Path) -> None:
    started = {action: run(tmp_path / action, action, "cuda")["started"] for action in ("connect", "probe")}
    counts = {action: sum(name.endswith("/nvcc") for name in names) for action, names in started.items()}
    assert counts["connect"] == 0 and counts["probe"] > 5


@pytest.mark.slow
def test_a_rank_on_a_cpu_does_not_build_shared_memory_collectives(tmp_path: Path) -> None:
    connected, alone = (run(tmp_path / action, action, "cpu") for action in ("connect", "probe"))
    assert connected["built"] == [] and alone["built"] == ["deepspeed_shm_comm"]
    assert "gcc" not in connected["started"] and "gcc" in alone["started"]
