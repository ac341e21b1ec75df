"""Tests starts under poor conditions.

The conditions are an almost empty environment, no compiler, little shared memory and late ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import BIN, TIMEOUT, TRAIN
from tests.integration.test_launchers import SMALL
from tests.support.environment import environment
from tests.support.ports import reserved_port

pytestmark = pytest.mark.slow

# Two runs of two ranks, one after the other; in each run, the second rank starts 2 s late. Then the script
# lists the files that remain in /dev/shm.
TWICE = """
if [ "$SMALL_SHM" ]; then mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 77; fi
for steps in 1 2; do
    export MASTER_PORT=$(eval echo \\$PORT$steps)
    RANK=0 LOCAL_RANK=0 "$@" run.steps=$steps & first=$!
    sleep 2
    RANK=1 LOCAL_RANK=1 "$@" run.steps=$steps || exit 1
    wait $first || exit 1
done
echo left:
if [ "$SMALL_SHM" ]; then ls -A /dev/shm; fi
"""


def bare(home: Path, path: str = f"{BIN}:/usr/bin:/bin") -> dict[str, str]:
    """Returns the environment of ``env -i PATH=... HOME=...``, with the Hub and GPUs disabled."""
    return {"PATH": path, "HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def start(command: list[str], cwd: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Returns (exit code, output) of each process and kills the processes that they have started."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_plain_python_with_hardly_any_environment(tmp_path):
    ((code, output),) = ended(start([sys.executable, TRAIN, *SMALL, "run.steps=1"], tmp_path, bare(tmp_path)))
    assert code == 0 and steps(tmp_path / "run") == [1], output


def test_ranks_that_come_one_by_one_without_a_compiler_and_with_little_shared_memory_twice(tmp_path):
    path = str(tmp_path / "bin")
    os.mkdir(path)
    for tool in ("sleep", "ls", "mount"):
        os.symlink(shutil.which(tool), f"{path}/{tool}")
    assert (
        shutil.which("cc", path=path)
        is shutil.which("gcc", path=path)
        is shutil.which("ninja", path=path)
        is None
    )
    ranks = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "PORT1": str(reserved_port()),
        "PORT2": str(reserved_port()),
    }
    cache = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    shell = [shutil.which("sh"), "-c", TWICE, "sh", sys.executable, TRAIN, *SMALL]
    namespace, small = own_mounts()
    ((code, output),) = ended(
        start([*namespace, *shell], tmp_path, bare(tmp_path, path) | ranks | cache | small)
    )
    assert code == 0, output
    assert steps(tmp_path / "run") == [1, 2]  # the second run continued in the same folder
    assert not (tmp_path / "extensions").exists() and not list(tmp_path.rglob("*.so"))  # nothing was compiled
    assert output.endswith("left:\n"), output


def own_mounts() -> tuple[list[str], dict[str, str]]:
    """Returns a command prefix for a separate mount namespace, and its environment, where this is allowed."""
    unshare = shutil.which("unshare")
    allowed = (
        unshare
        and subprocess.run(
            [unshare, "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True
        ).returncode
        == 0
    )
    return ([unshare, "-m"], {"SMALL_SHM": "64m"}) if allowed else ([], {})


def test_a_sweep_is_refused_under_several_ranks(tmp_path):
    """Every rank would run every job of the sweep."""
    env = environment() | {"WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, TRAIN, "-m", *SMALL, "run.seed=1,2"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "-m" in line
