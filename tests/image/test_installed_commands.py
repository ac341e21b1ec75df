"""Tests the commands of a wheel that is built from the source distribution, away from the repository."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from ppo_ds.models import tiny
from tests.support.environment import ROOT, environment
from tests.support.packages import create_environment
from tests.support.ports import reserved_port

NOT_COMMANDS = {"python", "__init__", "cli", "composing", "help", "hub", "process"}  # modules of launch/
OTHERS = ("ppo_ds", "__editable__", "pip", "setuptools", "_distutils", "__pycache__")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the bin folder of an environment with the wheel and this environment's packages."""
    folder = tmp_path_factory.mktemp("installed")
    copy = folder / "copy"  # so that the build leaves no files in the repository
    copy.mkdir()
    for name in ("ppo_ds", "launch", "conf", "setup.py", "setup.cfg", "pyproject.toml", "LICENSE"):
        (copy / name).symlink_to(ROOT / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run(
        [sys.executable, "-c", build], cwd=copy, check=True, env=environment(), capture_output=True
    )
    (source,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    wheel = [*pip, "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(wheel, check=True, env=environment(), capture_output=True, text=True)
    packages = create_environment(folder / "venv", with_pip=True)
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    links = folder / "packages"  # every installed package but ppo_ds itself
    links.mkdir()
    for entry in Path(spec.origin).parents[1].iterdir():
        if not entry.name.startswith(OTHERS):
            (links / entry.name).symlink_to(entry)
    (packages / "others.pth").write_text(f"{links}\n")
    (file,) = folder.glob("*.whl")
    install = ["python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(file)]
    run(folder / "venv" / "bin", folder, *install)
    yield folder / "venv" / "bin"


def run(binaries: Path, cwd: Path, *command: str, code: int = 0) -> str:
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(PATH=path, PYTHONPATH=""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_every_command_has_an_entry_point() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    entries = config["options.entry_points"]["console_scripts"].split("\n")
    given = dict(map(str.strip, line.split("=")) for line in entries if line)
    modules = {path.stem for path in (ROOT / "launch").glob("*.py")} - NOT_COMMANDS
    assert given == {f"ppo-ds-{name}": "ppo_ds.commands.entry_points:main" for name in modules}


@pytest.mark.slow
def test_the_help_of_an_installed_command_and_the_version(installed: Path, tmp_path: Path) -> None:
    assert "ppo-ds-train" in run(installed, tmp_path, "ppo-ds-train", "--help")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    source = f"ppo_ds-{cited['version']}"
    assert {file.name for file in installed.parents[1].glob("ppo_ds-*")} == {
        f"{source}.tar.gz",
        f"{source}-py3-none-any.whl",
    }


@pytest.mark.slow
def test_the_wheel_contains_all_files(installed: Path) -> None:
    (package,) = installed.parent.glob("lib/python*/site-packages/ppo_ds")
    for folder, target in (("ppo_ds", ""), ("launch", "commands/launch"), ("conf", "commands/conf")):
        files = subprocess.run(
            ["git", "ls-files"], cwd=ROOT / folder, capture_output=True, text=True, check=True
        )
        missing = [name for name in files.stdout.splitlines() if not (package / target / name).is_file()]
        assert not missing and files.stdout


@pytest.mark.slow
def test_installed_commands_read_the_configs_of_the_package(installed: Path, tmp_path: Path) -> None:
    shown = run(installed, tmp_path, "ppo-ds-train", "+experiment=zysnlp", "--cfg", "job")
    here = [sys.executable, str(ROOT / "launch" / "train.py"), "+experiment=zysnlp", "--cfg", "job"]
    expected = subprocess.run(here, env=environment(), capture_output=True, text=True, check=True).stdout
    (package,) = installed.parent.glob("lib/python*/site-packages/ppo_ds")
    assert str(ROOT / "ppo_ds" / "examples") in expected
    assert shown == expected.replace(str(ROOT / "ppo_ds"), str(package))
    assert "usage: ppo-ds-export" in run(installed, tmp_path, "ppo-ds-export", "--help")
    assert "did you mean algo.kl.coef?" in run(installed, tmp_path, "ppo-ds-train", "algo.kl.coeff=1", code=2)


@pytest.mark.slow
def test_an_installed_command_trains_from_any_directory(installed: Path, tmp_path: Path) -> None:
    """Starts the deepspeed launcher, whose ranks run the console script."""
    tokenizer = tiny.character_tokenizer("ab")
    model = tiny.tiny_llama(tokenizer, hidden_size=8, layers=1, heads=2, max_tokens=16)
    tiny.save(model, tokenizer, tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = [
        "actor.model.path=model",
        "actor.model.dtype=fp32",
        "data.path=prompts.jsonl",
        "reward=length",
    ]
    settings += [
        "reward.longest=3",
        "rollout.prompts_per_step=2",
        "sampling.max_new_tokens=4",
        "run.steps=1",
        "run.name=here",
    ]
    launcher = [str(installed / "python"), "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    launcher += ["--master_port", str(reserved_port()), str(installed / "ppo-ds-train")]
    run(installed, tmp_path, *launcher, *settings, "run.threads=1")
    summary = json.loads((tmp_path / "outputs" / "here" / "summary.json").read_text())
    assert summary["exit_reason"] == "done" and summary["steps"] == 1
    assert "step_000001, actor" in run(installed, tmp_path, "ppo-ds-export", "outputs/here")
