"""Runs the installation step of the Makefile with a fake Python, which writes down how pip is called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.environment import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

PYTHON = """#!/bin/sh
case "$*" in
    "-m venv --clear .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip install "*) shift 3; echo "$@" >> pip_calls ;;
    *) exit 1 ;;
esac
"""


def install(folder: Path, *arguments: str, gpu: bool) -> tuple[list[str], str]:
    """Returns the arguments of each call of pip install, and the output of make."""
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("fake_python", PYTHON), ("nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["make", ".venv/.installed", f"PYTHON={programs / 'fake_python'}", *arguments],
        cwd=folder,
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "pip_calls").read_text().splitlines(), done.stdout


def test_a_machine_without_a_gpu_gets_torch_without_cuda(tmp_path: Path) -> None:
    (torch, rest), output = install(tmp_path, gpu=False)
    assert "torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu" in torch
    assert rest.endswith("-c constraints.txt -e .[dev]")
    assert "no NVIDIA GPU found: installing torch without CUDA" in output


def test_a_machine_with_a_gpu_gets_the_torch_of_pypi(tmp_path: Path) -> None:
    (torch, _), output = install(tmp_path, gpu=True)
    assert torch.endswith(" torch==2.13.0") and "no NVIDIA GPU" not in output


def test_a_given_torch_is_installed_as_it_is(tmp_path: Path) -> None:
    (torch, _), output = install(tmp_path, "TORCH=torch==2.12.0 --index-url https://example.org", gpu=False)
    assert torch.endswith(" torch==2.12.0 --index-url https://example.org")
    assert "no NVIDIA GPU" not in output


def test_the_installation_ends_with_how_to_use_it(tmp_path: Path) -> None:
    _, output = install(tmp_path, gpu=True)
    assert output.splitlines()[-1].endswith("to use it in this shell: source .venv/bin/activate")
