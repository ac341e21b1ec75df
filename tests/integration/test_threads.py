"""Tests the threads of each rank under three launchers, whose own defaults differ but must not apply."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_ds.distributed.spinning import TASKS, thread_times
from ppo_ds.distributed.threads import own_cores, share
from tests.integration.launching import LAUNCHERS, TIMEOUT, command, environment

pytestmark = pytest.mark.slow

WORKER = str(Path(__file__).with_name("threads_worker.py"))
# Eight cores, as in threads_worker.py, or fewer in a container with a CPU limit.
CORES = share(0, [replace(own_cores(), usable=frozenset(range(8)))], None).cores


def found(launcher: str, folder: Path, **settings: str) -> list[dict[str, object]]:
    """Returns the report of each rank.

    ``settings`` are added to an environment without OMP_NUM_THREADS.
    """
    clean = {key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"}
    start = [WORKER if part.endswith("train.py") else part for part in command(launcher)]
    done = subprocess.run(
        start,
        env=clean | settings | {"FOUND": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize(
    ("launcher", "settings"),
    [("deepspeed", {}), ("torchrun", {}), ("python", {}), ("python", {"OMP_NUM_THREADS": "1"})],
)
def test_ranks_share_the_cores_whatever_the_launcher_sets(
    launcher: str, settings: dict[str, str], tmp_path: Path
) -> None:
    """A number of threads that the user sets is an upper bound."""
    ranks = 1 if launcher == "python" else 2
    each = 1 if settings else max(1, CORES // ranks)
    waits = "waits: spinning, asleep on a busy machine" if each > 1 and thread_times(TASKS) else ""
    assert (
        found(launcher, tmp_path, **settings)
        == [{"torch": each, "children": str(each), "cores": CORES, "ranks": ranks, "waits": waits}] * ranks
    )


def test_run_threads_is_the_key_that_asks_for_another_number(tmp_path: Path) -> None:
    assert [rank["torch"] for rank in found("torchrun", tmp_path, ASKED="3")] == [3, 3]
    assert LAUNCHERS["torchrun"][-1] == "2"  # 2 ranks
