"""Tests PPO steps of the large experiments on one rank of 8 or 64 simulated GPUs, and the doctor's memory.

DeepSpeed's engines are real and have the real widths (fake_world.py). Most models have fewer layers than the
real ones, since all of a kind are equal: the time of a simulation is proportional to their number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_sim import stub
from tests.gpu_sim.report import listed

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

OFFLOADED = ("zero=stage2", *(f"{role}.zero.offload_optimizer=true" for role in ("actor", "critic")))
PARAMETERS = tuple(f"{role}.zero.offload_params=true" for role in ("actor", "critic"))
LONG = (
    "sampling.max_new_tokens=65536",
    "data.max_prompt_tokens=1024",
    "rollout.prompts_per_step=8",
    "algo.minibatch_size=8",
)
# name -> arguments of fake_world.py: the experiment, ranks, layers, settings
WORLDS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "7b on 8": ("rlhf_7b", 8, 28, ()),
    "7b on 64": ("rlhf_7b", 64, 2, ()),
    "70b on 8": ("rlhf_70b", 8, 4, ()),
    "70b on 64": ("rlhf_70b", 64, 2, ()),
    "70b lora on 8": ("rlhf_70b_lora", 8, 2, ()),
    "70b lora on 64": ("rlhf_70b_lora", 64, 2, ()),
    "divided rows": ("rlhf_7b", 8, 2, (*LONG, "memory.sequence_parallel=4")),
    "zero3 offload": ("rlhf_7b", 8, 2, (*OFFLOADED[1:], *PARAMETERS)),
    "zero2": ("rlhf_7b", 8, 2, ("zero=stage2",)),
    "zero2 offload": ("rlhf_7b", 8, 2, OFFLOADED),
    "zero0 fp32": ("rlhf_7b", 8, 2, ("zero=stage0", "actor.model.dtype=fp32")),
}
# With few layers under ZeRO-3, the doctor's sum of a layer's activations and the whole LM head is too high in
# forwards, because these are not in memory at the same time.
FEW_LAYERS = 0.4
NIGHTLY = ("7b on 8", "70b on 8")  # minutes each, since they have many layers
NAMES = [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in WORLDS]
COMPARED = ("7b on 8", "70b on 8", "zero2", "zero2 offload", "zero0 fp32")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns a function that simulates a world in a new process, once."""
    if (reason := stub.missing()) is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder, found = tmp_path_factory.mktemp("worlds"), {}

    def run(name: str) -> dict[str, Any]:
        if name not in found:
            experiment, ranks, layers, settings = WORLDS[name]
            output = folder / f"{name}.json"
            command = [sys.executable, "-m", "tests.gpu_sim.fake_world", experiment, str(ranks)]
            command += ["--layers", str(layers), "--json", str(output)]
            command += [part for setting in settings for part in ("--set", setting)]
            process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
            assert output.exists(), f"{name}:\n{process.stderr[-4000:]}"
            found[name] = json.loads(output.read_text())
        return found[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_a_step_runs_all_phases_on_one_device(simulated: Callable[[str], dict[str, Any]], name: str) -> None:
    world = simulated(name)
    assert not world["mixed"], listed(Counter(world["mixed"]))
    generated = {"generate"} if "lora" in name else set()  # by vLLM
    assert set(world["phases"]) >= set(world["doctor"]["phases"]) - generated
    assert set(world["packed"].values()) == {"fp32" not in name}  # packed; the kernel needs 16 bits


@pytest.mark.parametrize("name", NAMES)
def test_the_doctor_counts_the_bytes_between_phases(
    simulated: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Compares weights, master weights and gradient buffers of each role, and all moments of Adam."""
    world = simulated(name)
    doctor = world["doctor"]["resident"]
    for role, counted in world["resident"].items():
        moments = world["doctor"]["moments"].get(role, 0)
        assert counted == pytest.approx(doctor.get(role, 0) - moments, rel=0.01), role
    assert world["moments"] == pytest.approx(sum(world["doctor"]["moments"].values()), rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_doctor_is_within_ten_percent_of_the_counted_bytes(
    simulated: Callable[[str], dict[str, Any]], name: str
) -> None:
    world = simulated(name)
    gaps = {
        phase: estimated / world["phases"][phase] - 1
        for phase, estimated in world["doctor"]["phases"].items()
        if phase in world["phases"]
    }
    print({phase: f"{gap:+.1%}" for phase, gap in gaps.items()})
    highest = 0.1 if name in COMPARED else FEW_LAYERS
    assert len(gaps) > 6 and all(-0.1 < gap < highest for gap in gaps.values()), gaps


@pytest.mark.parametrize("name", [name for name in NAMES if "lora" not in str(name)])
def test_no_forward_or_backward_synchronizes_the_device(
    simulated: Callable[[str], dict[str, Any]], name: str
) -> None:
    """Sums of the CPU, the start of the engines, optimizer steps and gathers of whole weights may.

    With LoRA and ZeRO-3, the first forward does for each adapter; DeepSpeed then gathers it with its layer.
    """
    found = [wait for wait in simulated(name)["waits"] if wait.startswith("torch.cuda.synchronize")]
    may = ("deepspeed.initialize", "GatheredParameters(", "world.py", "self.engine.step()")
    assert found and not [wait for wait in found if not any(place in wait for place in may)]
