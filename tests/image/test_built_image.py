"""Executes the Dockerfile on a stand-in for its base image, and runs the image's commands as Docker does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.image.chroot import Container, Image, stand_in, unavailable
from tests.image.test_install_steps import OFFLINE
from tests.support.environment import ROOT

pytestmark = pytest.mark.nightly
OUTPUTS, FOREIGN = "/workspace/outputs", "4242:4243"
TINY = [
    *("+experiment=quickstart", "run.name=tiny", "prepare.max_operand=9", "prepare.heldout=10"),
    *("prepare.validation=10", "prepare.target_accuracy=0.1", "rollout.prompts_per_step=16"),
    *("algo.minibatch_size=8", "eval.every=null"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    if reason := unavailable(folder):
        pytest.skip(reason)
    built = Image(folder, ROOT, [stand_in(folder)])
    try:
        built.build((ROOT / "Dockerfile").read_text())
    except RuntimeError as error:
        if OFFLINE.search(str(error)):
            pytest.skip("needs a network: the package index cannot be reached")
        raise
    yield built
    shutil.rmtree(folder)  # two gigabytes, which pytest would keep


@pytest.fixture
def start(image: Image, tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """Returns a function that starts a container, which is removed after the test."""
    started: list[Container] = []

    def run(*arguments: str, **options: Any) -> Container:
        folder = tmp_path / f"container{len(started)}"
        started.append(Container(image, folder, *arguments, DS_ACCELERATOR="cpu", **options))
        return started[-1]

    yield run
    for container in started:
        container.remove()


def wait_for(condition: Callable[[], object], container: Container) -> None:
    """Returns when the condition is true; fails with the output if the container has ended."""
    while not condition():
        assert container.process.poll() is None, container.wait()
        time.sleep(0.2)


def steps(container: Container) -> list[int]:
    path = container.volume(OUTPUTS) / "tiny/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for record in map(json.loads, lines) if "step" in record]


def test_the_layers_hold_the_locked_packages_and_no_torch(image: Image) -> None:
    base, *layers = (layer.files for layer in image.layers)
    (packages,) = base.glob("usr/local/lib/python*/dist-packages")
    assert list(packages.glob("torch/_C.*"))
    found = [path for files in layers for path in (files / packages.relative_to(base)).glob("*.dist-info")]
    names = {path.name.partition("-")[0] for path in found}
    assert {"deepspeed", "transformers", "ppo_ds"} <= names and not {"torch", "triton", "setuptools"} & names
    assert image.find("/workspace/launch/train.py").exists() and not image.find("/workspace/docs").exists()


def test_files_that_git_ignores_are_not_copied(image: Image) -> None:
    (copied,) = (layer.files / "workspace" for layer in image.layers if layer.instruction == "COPY . .")
    names = [str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(names) > 500 and sorted(set(names) - set(listed.stdout.splitlines())) == []


def test_arguments_reach_the_run_and_its_exit_code_reaches_docker(start: Callable[..., Container]) -> None:
    code, output = start().wait()
    assert code == 0 and "+experiment=NAME" in output
    assert "warning: /dev/shm has 64 MB" in output
    code, output = start("algo.kl.coeff=1", shm="2g").wait()
    assert code == 2 and "did you mean algo.kl.coef?" in output and "/dev/shm" not in output


def test_a_stopped_container_saves_and_the_same_command_continues(start: Callable[..., Container]) -> None:
    run = start(*TINY, "run.steps=100000")
    wait_for(lambda: steps(run), run)
    assert run.execute(*run.image.health) == (0, "healthy: 1 run\n")
    run.signal(signal.SIGTERM)
    code, output = run.wait()
    reached = steps(run)[-1]
    assert code == 143 and reached < 100000, output
    assert (run.volume(OUTPUTS) / "tiny/checkpoints").is_dir(), output
    code, output = start(*TINY, f"run.steps={reached + 1}", binds=run.mounted).wait()
    assert code == 0 and steps(run) == list(range(1, reached + 2)), output


def test_a_run_that_stands_still_is_unhealthy_until_it_goes_on(start: Callable[..., Container]) -> None:
    run = start(*TINY, "run.steps=100000")
    wait_for(lambda: steps(run), run)
    lock = run.volume(OUTPUTS) / "tiny/run.lock"
    ranks = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and holds(pid, "tiny/run.lock")]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGSTOP)
    renewed = time.time() - 360
    os.utime(lock, (renewed, renewed))
    code, output = run.execute(*run.image.health)
    assert code == 1 and output.startswith(f"unhealthy: {OUTPUTS}/tiny/run.lock has not been renewed for 36")
    os.kill(ranks[0], signal.SIGCONT)
    wait_for(lambda: run.execute(*run.image.health)[0] == 0, run)
    run.signal(signal.SIGINT)  # Ctrl-C
    assert run.wait()[0] == 143


def holds(pid: str, name: str) -> bool:
    """Returns whether a process holds a file open whose path in its container ends with ``name``."""
    try:
        return any(os.readlink(link).endswith(name) for link in Path("/proc", pid, "fd").iterdir())
    except OSError:
        return False


def test_a_user_without_a_name_trains_into_a_folder_of_its_own(
    start: Callable[..., Container], tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    os.chown(outputs, *map(int, FOREIGN.split(":")))
    run = start(*TINY, "run.steps=1", user=FOREIGN, binds={outputs: OUTPUTS})
    code, output = run.wait()
    assert code == 0, output
    assert json.loads((outputs / "tiny/summary.json").read_text())["exit_reason"] == "done"
    assert {(path.stat().st_uid, path.stat().st_gid) for path in outputs.rglob("*")} == {(4242, 4243)}
    written = [path.relative_to(run.changes) for path in run.changes.rglob("*") if not path.is_dir()]
    # so that docker run --read-only --tmpfs /tmp works
    assert [path for path in written if path.parts[0] != "tmp"] == []


@pytest.mark.parametrize(("user", "volumes"), [("", {"/cache", OUTPUTS}), (FOREIGN, {"/cache"})])
def test_the_user_of_the_run_writes_to_its_volumes_only(
    start: Callable[..., Container], user: str, volumes: set[str]
) -> None:
    options = ["-writable", "!", "-type", "l", "!", "-path", "/proc/*", "!", "-path", "/dev/*"]
    _, output = start("/", "-xdev", *options, user=user, entrypoint=["find"]).wait()
    writable = {line for line in output.splitlines() if line.startswith("/")}
    writable = {line for line in writable if "Permission denied" not in line}
    assert writable == volumes | {"/tmp", "/var/tmp", "/run/lock"}, output
