"""Exit codes and surroundings of a sound config, with a stand-in for the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from commands import MINIMAL

from launch import train
from ppo_ds.errors import UserError


class Left(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """main() with what fit() or build_trainer() does; gives the exit code."""

    def leave(code: int) -> None:
        raise Left(code)

    def run(fit: Any = None, build: Any = None) -> int:
        world = SimpleNamespace(barrier=lambda: None, close=lambda: closed.append(True))
        wiring = ModuleType("build")
        wiring.build_trainer = build or (lambda config, watch: SimpleNamespace(fit=fit, fail=lambda error: None, world=world))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ppo_ds.build", wiring)
        monkeypatch.setattr(train, "prepare_environment", lambda verbose: None)
        monkeypatch.setattr(train, "leave", leave)
        closed: list[bool] = []
        try:
            return train.main(list(MINIMAL))
        except Left as left:
            code = left.args[0]
            assert closed or code in (1, 2)  # a run that went well leaves the process group together with the others
            return code

    return run


def test_the_reason_to_stop_is_the_exit_code(run: Any) -> None:
    assert run(fit=lambda: "done") == 0
    assert run(fit=lambda: "signal") == 143


def test_the_users_mistake_found_while_building_is_2_and_has_no_traceback(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def build(config: Any, watch: Any) -> None:
        raise UserError("data.path=x: is empty", "reward.path=y: no such function")

    assert run(build=build) == 2
    assert capsys.readouterr().err.splitlines() == ["error: data.path=x: is empty", "error: reward.path=y: no such function"]


@pytest.mark.parametrize("kind", [UserError, RuntimeError])
def test_what_goes_wrong_while_training_is_1_with_its_traceback(run: Any, capsys: pytest.CaptureFixture[str], kind: type[Exception]) -> None:
    def broken_reward() -> str:
        raise kind("no score")

    assert run(fit=broken_reward) == 1
    assert run(build=lambda config, watch: 1 / 0) == 1
    err = capsys.readouterr().err
    assert "in broken_reward" in err and "ZeroDivisionError" in err


def test_the_users_settings_stay(tmp_path: Path) -> None:
    code = "import json, os; from launch.train import prepare_environment; prepare_environment(False); print(json.dumps(dict(os.environ)))"

    def surroundings(**environment: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if k not in (*train.QUIET, "TOKENIZERS_PARALLELISM")}
        root = str(Path(train.__file__).parents[1])
        done = subprocess.run([sys.executable, "-c", code], cwd=root, env=clean | environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    env = surroundings()
    assert (env["TRANSFORMERS_VERBOSITY"], env["TOKENIZERS_PARALLELISM"]) == ("error", "false")
    env = surroundings(TRANSFORMERS_VERBOSITY="info", TOKENIZERS_PARALLELISM="true")
    assert (env["TRANSFORMERS_VERBOSITY"], env["TOKENIZERS_PARALLELISM"]) == ("info", "true")
