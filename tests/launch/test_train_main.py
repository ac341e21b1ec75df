"""Tests the exit codes and the environment of launch/train.py with a stand-in for the trainer."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch import process, train
from ppo_ds.distributed.exit import run_exit_actions
from ppo_ds.distributed.gpus import AMD
from ppo_ds.errors import UserError
from ppo_ds.rewards.base import Responses, RewardError, TextReward
from ppo_ds.rewards.function import FunctionReward
from ppo_ds.rewards.remote import RemoteReward
from ppo_ds.storage.run_lock import RunLock
from tests.config.commands import MINIMAL
from tests.support.environment import SET_BY_LAUNCHERS


class Left(BaseException):
    """Raised by the stand-in for exit_now, which would end this process."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Yields a function that runs main() with the given fit() or build_run() and returns the exit code."""
    monkeypatch.chdir(tmp_path)

    def exit_now(code: int) -> None:
        raise Left(code)

    def run(fit: Any = None, build: Any = None) -> int:
        world = SimpleNamespace(barrier=lambda: None, close=lambda: closed.append(True))
        wiring = ModuleType("build")
        wiring.build_run = build or (
            lambda config, watch, mark_ending, screen: SimpleNamespace(
                fit=fit, fail=lambda error: None, world=world
            )
        )  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ppo_ds.assemble.run", wiring)
        monkeypatch.setattr(train, "prepare_environment", lambda verbose, trains, fixed_segments: None)
        # it would refuse this process, which has imported huggingface_hub
        monkeypatch.setattr(train, "use_caches_without_the_hub", lambda names: None)
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

    handler = signal.getsignal(signal.SIGINT)
    yield run
    signal.signal(signal.SIGINT, handler)  # a failed run ignores Ctrl-C while it ends
    faulthandler.cancel_dump_traceback_later()  # the timer of a hang, which would end this process


def test_the_reason_to_stop_is_the_exit_code(run: Any) -> None:
    assert run(fit=lambda: "done") == 0
    assert run(fit=lambda: "signal") == 143


def test_the_users_mistake_found_while_building_is_2_and_has_no_traceback(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(config: Any, watch: Any, mark_ending: Any, screen: Any) -> None:
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
    assert run(build=lambda config, watch, mark_ending, screen: 1 / 0) == 1
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


# Replaces torch: its import prints the environment and ends the process.
TORCH = "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\nos._exit(0)\n"


def environment_at_import(folder: Path, script: str, *arguments: str, **given: str) -> dict[str, str]:
    """Returns the environment of a program at its import of torch."""
    (folder / "modules" / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "modules" / "torch" / "__init__.py").write_text(TORCH)
    ours = (*process.DEFAULTS, *process.ALLOCATOR_SETTINGS, *process.QUIET, *SET_BY_LAUNCHERS)
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, str(Path(train.__file__).with_name(script)), *arguments],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(folder / "modules")} | given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *started, environment = done.stdout.splitlines()
    assert started == (["starting   importing torch"] if script == "train.py" else [])
    return json.loads(environment)


def test_settings_of_the_gpu_are_made_before_torch_is_imported(tmp_path: Path) -> None:
    """Checks both programs whose ranks use GPUs; launch/pipeline.py starts each stage as one of them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "held.jsonl").write_text('{"prompt": "a"}\n')
    for script, arguments in (
        ("train.py", [*MINIMAL, "run.dir=run"]),
        ("evaluate.py", ["model", "data.path=held.jsonl", "reward=function", "reward.path=pkg.mod:score"]),
    ):
        env = environment_at_import(tmp_path, script, *arguments)
        assert env["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"
        assert env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert "PYTORCH_CUDA_ALLOC_CONF" not in env


def test_torch_logs_no_stack_for_an_error_that_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch logs C++ stacks for a store that is gone, and for NCCL's errors, which a CPU cannot have."""
    log_level = environment_after(monkeypatch, False)["TORCH_CPP_LOG_LEVEL"]
    program = (
        "import socket\nfrom datetime import timedelta\nfrom torch.distributed import TCPStore\n"
        "with socket.create_server(('127.0.0.1', 0)) as closed:\n    port = closed.getsockname()[1]\n"
        "TCPStore('127.0.0.1', port, is_master=False, timeout=timedelta(seconds=0.5))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": log_level},
        capture_output=True,
        text=True,
    )
    assert done.stderr.startswith("Traceback") and "DistNetworkError" in done.stderr


def environment_after(monkeypatch: pytest.MonkeyPatch, fixed_segments: bool, **given: str) -> dict[str, str]:
    """Returns the variables of this program that ``prepare_environment`` leaves in an environment."""
    ours = (*process.DEFAULTS, *process.ALLOCATOR_SETTINGS, *process.QUIET)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]} | given)
    with warnings.catch_warnings():
        process.prepare_environment(False, fixed_segments=fixed_segments)
    return {name: os.environ[name] for name in ours if name in os.environ}


@pytest.mark.parametrize("name", process.ALLOCATOR_SETTINGS)
def test_the_users_settings_of_the_gpu_stay(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = {name: "max_split_size_mb:512", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"}
    env = environment_after(monkeypatch, False, **given)
    assert given.items() <= env.items()
    assert [other for other in process.ALLOCATOR_SETTINGS if other in env] == [name]


def test_expandable_segments_with_vllm_are_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment_at_import(tmp_path, "train.py", *MINIMAL, "run.dir=run", "rollout.backend=vllm")
    assert not set(process.ALLOCATOR_SETTINGS) & set(env)
    given = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    env = environment_after(monkeypatch, True, **given)
    assert {name: env[name] for name in process.ALLOCATOR_SETTINGS if name in env} == given


def start_on_a_gpu_machine(folder: Path, *arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Starts train.py with a torch that finds no GPU, on a machine whose nvidia-smi lists one.

    If the run continues, the process ends with code 77 as soon as it imports another library.
    """
    modules = folder / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text(
        "from types import SimpleNamespace\n__version__ = '2.13.0+cpu'\n"
        "version = SimpleNamespace(cuda=None, hip=None)\ncuda = SimpleNamespace(is_available=lambda: False)\n"
    )
    for name in ("accelerate", "datasets", "deepspeed", "numpy", "transformers"):
        (modules / f"{name}.py").write_text("import os\nos._exit(77)\n")
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-x)'\n")
    tool.chmod(0o755)
    hidden = (*SET_BY_LAUNCHERS, *AMD, "DS_ACCELERATOR")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = {"PYTHONPATH": str(folder / "modules"), "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, train.__file__, *MINIMAL, "run.dir=run", *arguments],
        cwd=folder,
        env=clean | paths | given,
        capture_output=True,
        text=True,
    )


def test_a_run_does_not_train_on_the_cpu_of_a_gpu_machine_unnoticed(tmp_path: Path) -> None:
    done = start_on_a_gpu_machine(tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch 2.13.0+cpu cannot use the GPU of this machine (")
    assert "): this torch is a CPU build; " in line and "DS_ACCELERATOR=cpu" in line
    assert not (tmp_path / "run").exists()  # the lock was released


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("run.dry_run=true", {}),
        ("run.seed=0", {"DS_ACCELERATOR": "cpu"}),
        ("run.seed=0", {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_a_run_for_the_cpu_goes_on_on_a_gpu_machine(
    tmp_path: Path, argument: str, given: dict[str, str]
) -> None:
    done = start_on_a_gpu_machine(tmp_path, argument, **given)
    assert done.returncode == 77, done.stderr


def test_the_users_settings_of_libraries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    env = environment_after(monkeypatch, False)
    assert (env["TRANSFORMERS_VERBOSITY"], env["TOKENIZERS_PARALLELISM"]) == ("error", "false")
    given = {"TRANSFORMERS_VERBOSITY": "info", "TOKENIZERS_PARALLELISM": "true"}
    assert given.items() <= environment_after(monkeypatch, False, **given).items()
