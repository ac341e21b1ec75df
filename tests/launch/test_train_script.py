"""Runs launch/train.py as a user or a launcher does, and checks exit codes and the output of each rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from torch.distributed import TCPStore

from launch.cli import load_config
from ppo_ds.distributed.launcher import reserved_port
from tests.config.commands import MINIMAL
from tests.support.environment import SET_BY_LAUNCHERS

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train.py"
WRONG = ("+experiment=rlhf", "algo.epoch=3", "data.path=/nowhere/a.jsonl")
LIMIT = 300  # seconds after which a process that hangs fails its test
LINES = [
    "error: algo.epoch=3: no such key; did you mean algo.epochs?",
    "error: data.path=/nowhere/a.jsonl: no such file",
]


def start(cwd: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env=clean | environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def test_a_wrong_config_exits_2_with_its_lines_only(tmp_path: Path) -> None:
    process = start(tmp_path, "--local_rank=0", *WRONG)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err.splitlines()) == (2, "", LINES)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def waiting_rank(tmp_path: Path) -> subprocess.Popen[str]:
    """Starts rank 1 with a wrong config. Its wait for rank 0 lasts until it reads a line of input."""
    lines = [
        f"import runpy, sys, time; sys.argv = ['train.py', '--local_rank=1', *{WRONG!r}]",
        "time.sleep = lambda seconds: (print(seconds, flush=True), sys.stdin.readline())",
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')",
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=os.environ | {"WORLD_SIZE": "2", "RANK": "1"},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    seconds = process.stdout.readline()
    assert seconds and float(seconds) >= 5, process.communicate(timeout=LIMIT)
    return process


@pytest.mark.slow
def test_other_ranks_wait_before_they_print_and_are_silent_if_they_are_ended(
    waiting_rank: subprocess.Popen[str],
) -> None:
    assert waiting_rank.poll() is None
    waiting_rank.terminate()  # launchers do this as soon as rank 0 has ended
    assert waiting_rank.communicate(timeout=LIMIT) == ("", "")


def test_other_ranks_print_the_problems_where_nobody_ends_them(waiting_rank: subprocess.Popen[str]) -> None:
    out, err = waiting_rank.communicate("\n", timeout=LIMIT)
    assert (waiting_rank.returncode, out) == (2, "")
    assert err.splitlines() == [f"rank 1: {line}" for line in LINES]


def test_help_ends_quietly_if_its_reader_has_ended() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--help"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
        )
    assert (done.returncode, done.stderr) == (0, "")


# -- the lock of the run directory, and the port ---------------------------------------------------

NO_LIBRARIES = f"""
import os, runpy, sys
os._exit = sys.exit
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
finally:
    print(sorted({{"torch", "deepspeed", "transformers", "datasets", "wandb"}} & sys.modules.keys()))
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Holds the lock of the run directory ``run`` in another process."""
    worker = Path(__file__).parents[1] / "storage" / "lock_worker.py"
    holder = subprocess.Popen(
        [sys.executable, str(worker), str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    yield holder
    holder.kill()
    holder.wait()


def without_libraries(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs train.py and adds a line to its output that lists the heavy libraries it has imported."""
    clean = {k: v for k, v in os.environ.items() if k not in SET_BY_LAUNCHERS}
    return subprocess.run(
        [sys.executable, "-c", NO_LIBRARIES, *arguments],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_a_wrong_config_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    done = without_libraries(tmp_path, *WRONG, WORLD_SIZE="2", RANK="0")
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "[]\n", LINES)


def test_a_second_start_in_a_run_directory_is_refused_before_anything_is_imported_or_touched(
    tmp_path: Path, held: subprocess.Popen[str]
) -> None:
    done = without_libraries(tmp_path, *MINIMAL, "run.dir=run")
    assert (done.returncode, done.stdout) == (2, "[]\n")
    (line,) = done.stderr.splitlines()
    assert (
        line.startswith("error: run.dir=run: is in use by a run on ")
        and f"process {held.pid}, since " in line
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    assert json.loads((tmp_path / "run" / "run.lock").read_text())["pid"] == held.pid


@pytest.mark.slow
def test_the_other_ranks_of_a_refused_start_end_with_the_same_code(
    tmp_path: Path, held: subprocess.Popen[str]
) -> None:
    """Runs rank 1 without a launcher, which would end the rank before it prints the line too."""
    done = without_libraries(
        tmp_path, *MINIMAL, "run.dir=run", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_PORT="1"
    )
    assert (done.returncode, done.stdout) == (2, "[]\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("rank 1: error: run.dir=run: is in use by ")


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_a_dry_run_takes_no_lock(tmp_path: Path, held: subprocess.Popen[str]) -> None:
    """A dry run gets as far as the import of libraries, which comes after taking the lock."""
    done = without_libraries(tmp_path, *MINIMAL, "run.dry_run=true", "run.dir=run")
    assert done.stdout != "[]\n" and "is in use" not in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("target", "name"), [("quickstart", "quickstart"), ("pipeline", "learned_reward")])
def test_make_starts_the_pipelines_without_a_gpu(target: str, name: str) -> None:
    command = ["make", "-n", "-o", ".venv/.installed", target, "ARGS=run.seed=1"]
    shown = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True, check=True).stdout
    assert "CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu" in shown
    assert f"bin/python launch/pipeline.py +pipeline={name} run.seed=1\n" in shown


def test_pipelines_that_start_together_get_different_ports() -> None:
    with reserved_port() as port, reserved_port() as other:
        assert port != other
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what an option such as --help prints before the program ends with exit code 0."""
    with pytest.raises(SystemExit) as end:
        load_config(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_cfg_prints_the_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(printed(capsys, "+experiment=rlhf", "--cfg", "job"))
    assert tree["reference"]["model"]["path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert tree["run"]["dir"] == "outputs/rlhf" and tree["actor"]["optim"]["lr"] == 1e-6


def test_help_names_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--help")
    experiments = "quickstart, reward_model, rlhf, rlhf_70b, rlhf_70b_lora, rlhf_7b, rlhf_7b_offload"
    assert experiments in " ".join(out.split())  # the list is wrapped
    for text in ("+experiment=NAME", "\n  actor ", "\n  sampling "):
        assert text in out
    out = printed(capsys, "--help", "actor.optim")
    for text in ("actor.optim.lr\n", "actor.optim.betas\n", "Type: number above 0. Default: 1e-06."):
        assert text in out
