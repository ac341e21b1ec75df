"""Runs the installation steps of the Dockerfile in a fresh environment, with files from PyPI."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.image.test_dockerfile import instructions
from tests.support.environment import ROOT, environment
from tests.support.packages import create_environment, metadata, pretend_installed

# The base image has torch 2.11. This environment's torch takes its place.
TORCH = "2.11.0+cu128"
OFFLINE = re.compile(r"Failed to establish a new connection|Name or service not known|name resolution")


def add_torch(packages: Path) -> Path:
    """Makes this environment's torch visible with the version and the requirements of the base image's torch.

    Returns its dist-info folder. Only this folder is visible to pip, which therefore cannot change torch's
    files.
    """
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    code = packages.parent / "torch_code"
    code.mkdir()
    for name in ("torch", "torchgen", "functorch"):
        folder = Path(spec.origin).parents[1] / name
        if folder.exists():
            (code / name).symlink_to(folder)
    (packages / "torch_code.pth").write_text(f"{code}\n")
    text = distribution("torch").read_text("METADATA") or ""
    text = re.sub(r"^Version: .*", f"Version: {TORCH}", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Requires-Dist: setuptools.*", "Requires-Dist: setuptools<82", text, flags=re.MULTILINE)
    return pretend_installed(packages, text)


def digests(folder: Path) -> dict[str, str]:
    """Returns the hashes of all files of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Image:
    """A virtual environment in place of the base image, and a folder in place of /workspace."""

    def __init__(self, folder: Path):
        self.venv, self.workspace = folder / "venv", folder / "workspace"
        self.workspace.mkdir()
        self.packages = create_environment(self.venv, with_pip=True)
        settings = [word for line in instructions("ENV") for word in shlex.split(line)]
        pip = dict(word.split("=", 1) for word in settings if word.startswith("PIP_"))
        pip.pop("PIP_NO_CACHE_DIR")  # deepspeed is built from source only once on a machine
        pip["PIP_COMPILE"] = "0"  # no .pyc files, which take half of the time
        self.environment = environment(**pip, PATH=f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
        self.run("pip", "install", "-q", "setuptools==81.0.0")

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Runs a command and returns its output. Skips the test if the package index cannot be reached."""
        done = subprocess.run(
            command, cwd=cwd or self.workspace, env=self.environment, capture_output=True, text=True
        )
        if done.returncode and OFFLINE.search(done.stderr):
            pytest.skip("needs a network: the package index cannot be reached")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def copy(self, *names: str) -> None:
        for name in names:
            source, target = ROOT / name, self.workspace / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copy(source, target)


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_install_everything_and_leave_torch_alone(tmp_path: Path) -> None:
    image = Image(tmp_path)
    brought = [
        add_torch(image.packages),
        pretend_installed(image.packages, metadata("torchvision", "0.26.0+cu128", "numpy", "torch==2.11.0")),
        pretend_installed(image.packages, metadata("triton", "3.6.0")),
    ]
    before = [digests(folder) for folder in brought]
    (shell,) = (shlex.split(re.sub(r"[][,]", " ", line)) for line in instructions("SHELL"))
    steps = [step for step in instructions("RUN") if "pip install" in step]
    copies = [line.split()[:-1] for line in instructions("COPY")]
    assert len(steps) == 1 and copies[1:] == [["."]]
    image.copy(*copies[0])
    image.run(*shell, steps[0])
    image.copy("ppo_ds", "launch", "conf")

    assert [digests(folder) for folder in brought] == before
    assert image.run("python", "-m", "pip", "check") == "No broken requirements found.\n"
    code = "import sentencepiece, torch, ppo_ds.assemble.run; from importlib.metadata import version; "
    code += "print(version('torch'))"
    assert image.run("python", "-c", code, cwd=tmp_path).split()[-1] == TORCH
    assert "+experiment=" in image.run("python", "launch/train.py", "--help")


def test_the_build_ends_if_the_installation_changes_torch(tmp_path: Path) -> None:
    """Runs the same steps with a pip that changes torch's version, and installs nothing."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "versions").write_text("torch==2.11.0\n")
    (tmp_path / "python").write_text(
        "#!/bin/sh\ncase $3 in list) cat versions;; install) echo torch==2.13.0 > versions;; esac\n"
    )
    (tmp_path / "python").chmod(0o755)
    (step,) = (step for step in instructions("RUN") if "pip install" in step)
    (shell,) = (shlex.split(re.sub(r"[][,]", " ", line)) for line in instructions("SHELL"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*shell, step], cwd=workspace, env=environment(PATH=path), capture_output=True, text=True
    )
    assert done.returncode == 1 and "> torch==2.13.0" in done.stdout
