"""Tests the parts of the Docker image that need no build: its user, its scripts and its health check."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import healthcheck
from ppo_ds.storage import run_lock
from tests.support.environment import ROOT

DOCKERFILE = re.sub(r"\\\n *", " ", (ROOT / "Dockerfile").read_text())


def instructions(kind: str) -> list[str]:
    return re.findall(rf"^{kind} (.*)$", DOCKERFILE, re.MULTILINE)


def test_the_run_has_a_numeric_user_that_is_not_root() -> None:
    (user,) = instructions("USER")
    assert user.isdigit() and int(user) > 0
    assert any(f"useradd --uid {user} " in command for command in instructions("RUN"))


def test_the_scripts_of_the_image_exist_and_are_valid_bash() -> None:
    (entry,) = instructions("ENTRYPOINT")
    (script,) = json.loads(entry)
    path = ROOT / script.removeprefix("/workspace/")
    assert os.access(path, os.X_OK)
    subprocess.run([shutil.which("bash") or "bash", "-n", str(path)], check=True)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Path]:
    """Returns the run directory of a process that holds a lock as a run does but does not renew it."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom ppo_ds.storage import run_lock\n"
        "lock = run_lock.acquire(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    yield tmp_path / "run"
    process.kill()
    process.wait()


def check(*arguments: str) -> tuple[int, str]:
    """Runs the command of the image's health check, which sees only the lock of this test's holder."""
    (command,) = (json.loads(line.partition("CMD ")[2]) for line in instructions("HEALTHCHECK"))
    assert command[0] == "python"
    script = ROOT / command[1].removeprefix("/workspace/")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(script), *command[2:], *arguments],
        capture_output=True,
        text=True,
    )
    assert not re.search(r"\| +(torch|ppo_ds|launch)$", done.stderr, re.MULTILINE), done.stderr
    return done.returncode, done.stdout


def age(run_dir: Path, minutes: float) -> None:
    renewed = time.time() - 60 * minutes
    os.utime(run_dir / run_lock.NAME, (renewed, renewed))


def test_a_run_that_has_not_renewed_its_lock_is_unhealthy(holder: Path) -> None:
    lock = str(holder / run_lock.NAME)
    assert lock not in check()[1]
    age(holder, minutes=6)
    code, output = check()
    assert code == 1 and re.search(
        rf"^unhealthy: {re.escape(lock)} .* 3\d\d s \(limit: 300 s\)$", output, re.M
    )
    assert lock not in check("--minutes", "10")[1]


def test_without_a_run_the_container_is_healthy(holder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads a folder in place of /proc, since other tests may hold locks."""
    processes = holder.parent / "proc"
    (processes / "self" / "fd").mkdir(parents=True)
    assert healthcheck.main([], processes) == 0
    (processes / "12" / "fd").mkdir(parents=True)
    for number, target in enumerate(("/dev/null", "/nowhere/run.lock", str(holder / "metrics.jsonl"))):
        (processes / "12" / "fd" / str(number)).symlink_to(target)
    assert healthcheck.main([], processes) == 0
    assert capsys.readouterr().out == "healthy: 0 runs\n" * 2
    age(holder, minutes=4)
    (processes / "12" / "fd" / "3").symlink_to(holder / run_lock.NAME)
    assert healthcheck.main([], processes) == 0
    assert capsys.readouterr().out == "healthy: 1 run\n"
    assert healthcheck.main(["--minutes", "3"], processes) == 1


def test_the_health_check_looks_for_the_name_of_the_lock() -> None:
    assert healthcheck.NAME == run_lock.NAME
