"""Runs launch/train.py as a user or a launcher does, and checks exit codes and the output of each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "train.py"
WRONG = ("+experiment=rlhf", "algo.epoch=3", "data.path=/nowhere/a.jsonl")
LIMIT = 300  # seconds; a hang fails
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


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "2", "RANK": "0"}])
def test_a_wrong_config_exits_2_with_its_lines_only(tmp_path: Path, environment: dict[str, str]) -> None:
    process = start(tmp_path, "--local_rank=0", *WRONG, **environment)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err.splitlines()) == (2, "", LINES)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def waiting_rank(tmp_path: Path) -> subprocess.Popen[str]:
    """Starts a rank 1 with a wrong config that waits for rank 0 until it reads a line of input."""
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


def test_a_wrong_config_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    lines = [
        f"import sys, runpy; sys.argv = ['train.py', *{WRONG!r}]",
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')",
        "except SystemExit as end: print(end.code)",
        "print(sorted({'torch', 'deepspeed', 'transformers', 'datasets', 'wandb'} & sys.modules.keys()))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout.split() == ["2", "[]"], done.stderr


def test_cfg_prints_the_resolved_config(tmp_path: Path) -> None:
    process = start(tmp_path, "+experiment=rlhf", "--cfg", "job")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0 and err == ""
    tree = yaml.safe_load(out)
    assert tree["reference"]["model"]["path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert tree["run"]["dir"] == "outputs/rlhf" and tree["actor"]["optim"]["lr"] == 1e-6


def test_help_names_groups_and_keys(tmp_path: Path) -> None:
    process = start(tmp_path, "--help")
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    for text in ("+experiment=NAME", "quickstart, rlhf, rlhf_7b", "\n  actor ", "\n  sampling "):
        assert text in out
    process = start(tmp_path, "--help", "actor.optim")
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    for text in ("actor.optim.lr\n", "actor.optim.betas\n", "Type: number above 0. Default: 1e-06."):
        assert text in out
