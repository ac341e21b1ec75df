"""Tests that an installation keeps the installed torch. pip resolves the requirements offline."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.security.test_docker import pins
from tests.support.environment import ROOT
from tests.support.packages import (
    create_environment,
    known_metadata,
    metadata,
    pretend_installed,
    write_wheel,
)

# Requirements of torch's wheels on PyPI, without NVIDIA's packages. The versions differ in two of them.
COMMON = (
    "filelock",
    "typing-extensions>=4.10.0",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)
TORCH = {
    "2.11.0": ("setuptools<82", "triton==3.6.0"),
    "2.12.0": ("setuptools<82", "triton==3.7.0"),
    "2.13.0": ("setuptools>=77.0.3", "triton==3.8.0"),
}
TORCHVISION = {"2.11.0": "0.26.0", "2.12.0": "0.27.0", "2.13.0": "0.28.0"}
SETUPTOOLS = {"2.11.0": "81.0.0", "2.12.0": "81.0.0", "2.13.0": "84.2.1"}
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def stack(torch: str, local: str = "") -> list[str]:
    """Returns the metadata of the packages that come with a torch; ``local`` is +cu128 in the image."""
    return [
        metadata("torch", f"{torch}{local}", *COMMON, *TORCH[torch]),
        metadata("torchvision", f"{TORCHVISION[torch]}{local}", "numpy", f"torch=={torch}", "pillow>=5.3.0"),
        metadata("triton", TORCH[torch][1].partition("==")[2]),
        metadata("setuptools", SETUPTOOLS[torch]),
    ]


def own_metadata() -> str:
    """Returns the metadata of ppo_ds with the requirements of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    requires = config["options"]["install_requires"].split("\n")
    extras = config["options.extras_require"]
    requires += [
        f'{line}; extra == "{extra}"' for extra, lines in extras.items() for line in lines.split("\n")
    ]
    lines = [line for line in requires if line[:1].strip() not in ("", "#", ";")]
    return metadata("ppo_ds", "0.1.0", *lines, extras=tuple(extras))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with all tested versions, and with the versions of torch that pip could change to."""
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, own_metadata())
    for name, version in pins(CONSTRAINTS).items():
        write_wheel(folder, known_metadata(name, version))
    for torch in TORCH:
        for text in stack(torch):
            write_wheel(folder, text)
    return folder


def resolve(folder: Path, wheels: Path, torch: str, constraints: str) -> dict[str, str]:
    """Returns the packages, and their versions, that pip would install beside a torch."""
    packages = create_environment(folder / "venv")
    for text in stack(torch, "+cu128"):
        pretend_installed(packages, text)
    (folder / "constraints.txt").write_text(constraints)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "venv"), "--disable-pip-version-check"]
        + ["install", "--quiet", "--dry-run", "--no-index", "--find-links", str(wheels)]
        + ["--report", str(folder / "report"), "-c", str(folder / "constraints.txt")]
        + ["ppo_ds[dev,sentencepiece]"],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    report = json.loads((folder / "report").read_text())
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}


@pytest.mark.parametrize("torch", TORCH)
def test_an_installation_keeps_torch_and_what_came_with_it(tmp_path: Path, wheels: Path, torch: str) -> None:
    installed = resolve(tmp_path, wheels, torch, CONSTRAINTS)
    assert not {"torch", "torchvision", "triton", "setuptools"} & set(installed)
    assert installed["ppo_ds"] == "0.1.0" and installed["deepspeed"] == pins(CONSTRAINTS)["deepspeed"]


def test_a_pinned_setuptools_would_replace_torch(tmp_path: Path, wheels: Path) -> None:
    installed = resolve(tmp_path, wheels, "2.11.0", f"{CONSTRAINTS}setuptools==84.2.1\n")
    assert (installed["torch"], installed["setuptools"]) == ("2.13.0", "84.2.1")


def test_neither_torch_nor_setuptools_is_pinned() -> None:
    for name in ("constraints.txt", "requirements.lock"):
        assert not {"torch", "torchvision", "triton", "setuptools"} & set(pins((ROOT / name).read_text()))
