"""Tests how a pipeline runs its stages: order, resumption, changed inputs, exit codes and stop signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ppo_ds.config.schema import resolved
from ppo_ds.distributed.child_groups import ChildGroups
from ppo_ds.errors import UserError
from ppo_ds.tools.pipeline import Job, Pipeline, run_pipeline
from tests.config.commands import MINIMAL, compose
from tests.support.environment import ROOT, environment

FAKE = Path(__file__).with_name("fake_stage.py")
LIMIT = 120.0  # seconds until a hang fails the test


def stage(folder: Path, name: str, *overrides: str, after: str | None = None) -> Job:
    """Makes the job of a fake stage, which reads the model of the stage ``after``."""
    config = compose(*MINIMAL, f"run.dir={folder / name}", *overrides)
    settings = folder / f"{name}.yaml"
    settings.write_text(yaml.safe_dump(resolved(config)))
    read = str(folder / after / "model" / "config.json") if after else ""
    return Job(name, FAKE, [str(folder / name), str(settings), read], 1, config)


def pipeline_in(folder: Path, **overrides: list[str]) -> Pipeline:
    """Makes a pipeline of two stages; ``overrides`` are further settings by stage."""
    stages = [
        stage(folder, "sft", *overrides.get("sft", [])),
        stage(folder, "ppo", *overrides.get("ppo", []), after="sft"),
    ]
    return Pipeline("test", folder, stages, dry_run=False)


@pytest.fixture
def groups() -> Iterator[ChildGroups]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield ChildGroups()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path, groups: ChildGroups):
    """Runs the pipeline; returns its exit code, the stages that were started, and the lines that it said."""

    def start(**overrides: list[str]) -> tuple[int, list[str], list[str]]:
        starts, lines = tmp_path / "starts", []
        starts.unlink(missing_ok=True)
        code = run_pipeline(pipeline_in(tmp_path, **overrides), groups, lines.append)
        return code, starts.read_text().split() if starts.exists() else [], lines

    return start


def test_stages_run_in_order_once(tmp_path: Path, run) -> None:
    assert run()[:2] == (0, ["sft", "ppo"])
    assert (tmp_path / "ppo" / "model" / "config.json").read_text() == "sft;ppo;"
    code, started, lines = run()
    assert (code, started) == (0, []) and all(line.endswith("is done") for line in lines)


def test_a_failed_stage_ends_the_pipeline_and_is_started_again(tmp_path: Path, run) -> None:
    (tmp_path / "ppo.action").write_text("fail")
    assert run()[:2] == (3, ["sft", "ppo"])
    assert run()[:2] == (3, ["ppo"])
    (tmp_path / "ppo.action").unlink()
    assert run()[:2] == (0, ["ppo"])


def test_a_stage_that_ends_early_ends_the_pipeline_with_its_exit_code(tmp_path: Path, run) -> None:
    (tmp_path / "sft.action").write_text("time_limit")
    code, started, lines = run()
    assert (code, started) == (0, ["sft"])
    assert lines[-1].endswith("ended early (exit_reason time_limit); the same command continues")


def test_an_exit_code_0_without_a_result_is_an_error(tmp_path: Path, run) -> None:
    (tmp_path / "sft.action").write_text("no result")
    assert run()[:2] == (1, ["sft"])
    (tmp_path / "sft.action").unlink()
    assert run()[0] == 0
    # the summary of the earlier start does not count
    (tmp_path / "sft.action").write_text("no result")
    assert run(sft=["run.steps=3"])[:2] == (1, ["sft"])


def test_changed_settings_start_a_stage_again(tmp_path: Path, run) -> None:
    assert run()[0] == 0
    assert run(ppo=["actor.optim.lr=1e-5"])[:2] == (0, ["ppo"])
    assert run(ppo=["actor.optim.lr=1e-5", "memory.train_tokens=99"])[:2] == (0, [])
    assert run(ppo=["actor.optim.lr=1e-5", "run.resume=restart"])[:2] == (0, ["ppo"])


def test_an_unfinished_extension_of_a_stage_is_not_taken_for_done(tmp_path: Path, run) -> None:
    assert run()[0] == 0
    (tmp_path / "ppo.action").write_text("fail")  # writes config.yaml, but no new summary
    assert run(ppo=["run.steps=3"])[:2] == (3, ["ppo"])
    (tmp_path / "ppo.action").unlink()
    assert run(ppo=["run.steps=3"])[:2] == (0, ["ppo"])


def test_a_missing_model_is_made_again(tmp_path: Path, run) -> None:
    assert run()[0] == 0
    (tmp_path / "ppo" / "model" / "config.json").unlink()
    assert run()[:2] == (0, ["ppo"])


def test_a_stage_that_has_begun_is_refused_once_its_inputs_have_changed(tmp_path: Path, run) -> None:
    assert run()[0] == 0
    (tmp_path / "sft" / "model" / "config.json").write_text("another")
    folder = tmp_path / "ppo"
    with pytest.raises(UserError) as caught:
        run()
    assert caught.value.problems == [
        f"ppo: the model of an earlier stage has changed since {folder} began; begin this stage "
        "anew with ppo:run.resume=restart, or choose another run.name"
    ]
    (tmp_path / "sft" / "model" / "config.json").rename(tmp_path / "sft" / "model" / "other.json")
    with pytest.raises(UserError):  # names count too
        run()
    (tmp_path / "sft" / "model" / "other.json").rename(tmp_path / "sft" / "model" / "config.json")
    assert run(ppo=["run.resume=restart"])[:2] == (0, ["ppo"])
    assert (folder / "model" / "config.json").read_text() == "anotherppo;"
    assert run()[:2] == (0, [])


def test_a_damaged_record_is_one_line(tmp_path: Path, run) -> None:
    assert run()[0] == 0
    (tmp_path / "pipeline.json").write_text('{"jobs": ')
    with pytest.raises(UserError, match="pipeline.json: is damaged .*; delete it: "):
        run()


# -- signals ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts the pipeline in a process, with a first stage whose ranks save after a stop signal."""
    (folder / "sft.action").write_text("ranks")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.run_fake_pipeline", str(folder)],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(folder / "sft" / "ready", process)
        yield process
    finally:
        process.kill()


def wait_for(path: Path, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_stop_signal_is_passed_on_and_the_pipeline_waits_for_all_ranks(
    tmp_path: Path, run, number: signal.Signals
) -> None:
    """The launcher of the fake stage ends at once, as deepspeed does, and its rank half a second later."""
    with started(tmp_path) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 143, output
    assert json.loads((tmp_path / "sft" / "summary.json").read_text()) == {"exit_reason": "signal"}
    assert f"stopped by {number.name}; the same command continues" in output
    assert (tmp_path / "starts").read_text() == "sft\n"
    (tmp_path / "sft.action").unlink()
    assert run()[:2] == (0, ["sft", "ppo"])


def test_a_killed_pipeline_leaves_no_running_stage(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LIMIT)
        wait_for(tmp_path / "sft" / "summary.json")
    assert json.loads((tmp_path / "sft" / "summary.json").read_text()) == {"exit_reason": "signal"}


def test_nothing_is_started_after_a_stop_signal(tmp_path: Path, groups: ChildGroups) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert groups.run(["touch", str(tmp_path / "file")]) == 143
    assert not (tmp_path / "file").exists()
