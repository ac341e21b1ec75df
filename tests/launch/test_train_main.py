"""Tests the exit codes and the environment of launch/train.py with a stand-in for the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch import train
from ppo_ds.distributed.exit import run_exit_actions
from ppo_ds.errors import UserError
from ppo_ds.rewards.base import Responses, RewardError, TextReward
from ppo_ds.rewards.function import FunctionReward
from ppo_ds.rewards.remote import RemoteReward
from ppo_ds.storage.run_lock import RunLock
from tests.config.commands import MINIMAL


class Left(BaseException):
    """Raised by the stand-in for exit_now, which would end this process."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Returns a function that runs main() with the given fit() or build_run() and returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def exit_now(code: int) -> None:
        raise Left(code)

    def run(fit: Any = None, build: Any = None) -> int:
        world = SimpleNamespace(barrier=lambda: None, close=lambda: closed.append(True))
        wiring = ModuleType("build")
        wiring.build_run = build or (
            lambda config, watch, mark_ending: SimpleNamespace(fit=fit, fail=lambda error: None, world=world)
        )  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ppo_ds.build.run", wiring)
        monkeypatch.setattr(train, "prepare_environment", lambda verbose: None)
        monkeypatch.setattr(train, "exit_now", exit_now)
        closed: list[bool] = []
        try:
            return train.main(list(MINIMAL))
        except Left as left:
            code = left.args[0]
            # a successful run leaves the process group together with the other ranks
            assert closed or code in (1, 2)
            return code
        finally:
            run_exit_actions()

    return run


def test_the_reason_to_stop_is_the_exit_code(run: Any) -> None:
    assert run(fit=lambda: "done") == 0
    assert run(fit=lambda: "signal") == 143


def test_the_users_mistake_found_while_building_is_2_and_has_no_traceback(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(config: Any, watch: Any, mark_ending: Any) -> None:
        raise UserError("data.path=x: is empty", "reward.path=y: no such function")

    assert run(build=build) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: data.path=x: is empty",
        "error: reward.path=y: no such function",
    ]


@pytest.mark.parametrize("kind", [UserError, RuntimeError])
def test_what_goes_wrong_while_training_is_1_with_its_traceback(
    run: Any, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def broken_reward() -> str:
        raise kind("no score")

    assert run(fit=broken_reward) == 1
    assert run(build=lambda config, watch, mark_ending: 1 / 0) == 1
    err = capsys.readouterr().err
    assert "in broken_reward" in err and "ZeroDivisionError" in err


def test_a_run_that_fails_marks_its_lock_so_that_the_next_start_waits(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[str] = []
    monkeypatch.setattr(RunLock, "mark_ending", lambda lock: marked.append(str(lock.path)))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("wrong")

    assert run(fit=fail) == 1 and len(marked) == 1
    assert run(build=fail) == 1 and len(marked) == 2
    assert run(build=refuse) == 2 and len(marked) == 3
    assert run(fit=lambda: "done") == 0 and len(marked) == 3  # Run.finish marks the end of a completed run


FUNCTIONS = """
def none(prompts, responses, rows): return None
def nan(prompts, responses, rows): return [float("nan")]
def two(prompts, responses, rows): return [1.0, 2.0]
def broken(prompts, responses, rows): return [1 / 0]
"""


@pytest.fixture
def error_lines(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the error lines of a run that asks its reward for one score."""

    def error_lines(reward: TextReward) -> list[str]:
        answers = Responses(({"prompt_text": "p"},), ("a",), (True,))
        assert run(fit=lambda: reward.score_responses(answers)) == 1
        return capsys.readouterr().err.splitlines()

    return error_lines


def test_a_reward_that_gives_no_score_ends_the_run_with_one_line(
    error_lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.py"
    file.write_text(FUNCTIONS)
    for name, words in {
        "none": "'None' (NoneType); it must return a list of 1 floats",
        "nan": "'nan' (float) for row 0, prompt 'p'; a score must be a finite number",
        "two": "2 scores for 1 responses",
    }.items():
        assert error_lines(FunctionReward(f"{file}:{name}", tokenizer=None)) == [
            f"error: reward.path={file}:{name} returned {words}"
        ]  # type: ignore[arg-type]
    monkeypatch.setenv("NO_PROXY", "*")
    (line,) = error_lines(
        RemoteReward(
            "http://127.0.0.1:1/",
            retries=0,
            backoff_seconds=0,
            tokenizer=None,  # type: ignore[arg-type]
        )
    )
    assert line.startswith("error: reward.url=http://127.0.0.1:1/: ") and line.endswith("(row 0, prompt 'p')")


def test_a_reward_that_raises_has_its_own_traceback(error_lines: Any, tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text(FUNCTIONS)
    lines = error_lines(FunctionReward(f"{file}:broken", tokenizer=None))  # type: ignore[arg-type]
    assert lines[0].startswith("Traceback") and f'  File "{file}", line 5, in broken' in lines
    error, note = [line for line in lines if line][-2:]
    assert error == "ZeroDivisionError: division by zero" and note.startswith(
        f"in reward.path={file}:broken, scoring 1 responses"
    )


def test_a_note_stands_in_the_line(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def bad_part() -> str:
        error = RewardError("a score is not finite: nan for row 0, prompt 'p'")
        error.add_note("in reward.parts.right")
        raise error

    assert run(fit=bad_part) == 1
    assert (
        capsys.readouterr().err
        == "error: a score is not finite: nan for row 0, prompt 'p'; in reward.parts.right\n"
    )


def test_the_users_settings_stay(tmp_path: Path) -> None:
    code = (
        "import json, os; from launch.train import prepare_environment; prepare_environment(False); "
        "print(json.dumps(dict(os.environ)))"
    )

    def surroundings(**environment: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if k not in (*train.QUIET, "TOKENIZERS_PARALLELISM")}
        root = str(Path(train.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=clean | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    env = surroundings()
    assert (env["TRANSFORMERS_VERBOSITY"], env["TOKENIZERS_PARALLELISM"]) == ("error", "false")
    env = surroundings(TRANSFORMERS_VERBOSITY="info", TOKENIZERS_PARALLELISM="true")
    assert (env["TRANSFORMERS_VERBOSITY"], env["TOKENIZERS_PARALLELISM"]) == ("info", "true")
