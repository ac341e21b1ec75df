"""Tests the trainer under three launchers: its output, how it ends, and that it can be resumed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.launching import ROOT, TIMEOUT, command, environment, launch

SMALL = ("+experiment=quickstart", "prepare.max_operand=9", "prepare.heldout=10", "prepare.validation=10",
         "prepare.target_accuracy=0.1", "rollout.prompts_per_step=16", "algo.minibatch_size=8",
         "eval.every=null", "run.dir=run", "reward=function",
         f"reward.path={ROOT}/tests/integration/digits.py:score")  # fmt: skip


def metrics(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_each_launcher_starts_the_same_program(launcher, tmp_path):
    done = launch(launcher, *SMALL, "run.steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2] and lines[-1]["episodes"] == 32
    assert done.stdout.count("step 2/2") == 1  # only one rank prints
    for noise in ("INFO", "WARNING", "Traceback"):
        assert noise not in done.stdout + done.stderr.replace("OMP_NUM_THREADS", ""), noise


@pytest.mark.slow
def test_it_continues_where_it_stopped_and_may_change_the_number_of_ranks(tmp_path):
    first = launch("deepspeed", *SMALL, "run.steps=4", "run.stop_at_step=2", cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "stop_at_step"
    assert (
        "checkpoint  run/checkpoints/step_000002   the same command without run.stop_at_step continues"
        in first.stdout
    )
    second = launch("python", *SMALL, "run.steps=4", cwd=tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.count("ranks 2 -> 1: random numbers, such as those of sampling, differ") == 1
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[2]["kl/ref_seq_mean"] != 0  # the actor differs from the reference
    assert [line["episodes"] for line in lines] == [16, 32, 48, 64]
    assert (
        json.loads((tmp_path / "run" / "checkpoints" / "step_000004" / "state.json").read_text())[
            "world_size"
        ]
        == 1
    )


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_save_and_end(tmp_path):
    process = subprocess.Popen(
        command("deepspeed", *SMALL, "run.steps=100000"),
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
    )
    run = tmp_path / "run"
    try:
        wait_for(lambda: (run / "samples" / "step_000002.jsonl").exists(), process)
        process.terminate()  # only the deepspeed command, not its ranks
        process.wait(TIMEOUT)
        wait_for((run / "summary.json").exists)
    finally:
        kill_session(process)
    assert json.loads((run / "summary.json").read_text())["exit_reason"] == "signal"
    assert (run / "checkpoints" / "latest").exists()


def wait_for(condition, process=None):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.05)


def kill_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_mistake_in_the_raw_json_is_the_users(tmp_path):
    given = launch("python", *SMALL, "actor.deepspeed.zero_optimization.stagee=3", cwd=tmp_path)
    assert given.returncode == 2 and "Traceback" not in given.stderr, given.stderr
    assert [
        line
        for line in given.stderr.splitlines()
        if line.startswith("error: actor.deepspeed=") and "stagee" in line
    ]
