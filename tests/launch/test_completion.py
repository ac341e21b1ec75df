"""Tests the completion of command lines in a shell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.cli import CONF
from launch.completion import overrides
from launch.composing import Folders
from tests.support.environment import ROOT, environment

FOLDERS = Folders((CONF,))


@pytest.mark.parametrize(
    "prefix, expected",
    [
        ("algo=gr", ["algo=grpo"]),
        ("+experiment=rlhf_70b", ["+experiment=rlhf_70b", "+experiment=rlhf_70b_lora"]),
        ("algo.kl.est", ["algo.kl.estimator="]),
        ("algo.kl.place=", ["algo.kl.place=reward", "algo.kl.place=loss", "algo.kl.place=none"]),
        ("algo.loss.norm_by_rank=", []),  # no such key
        ("run.deterministic=", ["run.deterministic=true", "run.deterministic=false"]),
        ("run.seed=", []),
        ("criti", ["critic."]),
        ("+pipe", ["+pipeline="]),
        ("nothing", []),
    ],
)
def test_overrides(prefix: str, expected: list[str]) -> None:
    assert list(overrides(prefix, FOLDERS)) == expected


def test_a_key_is_completed_one_part_at_a_time() -> None:
    made = list(overrides("algo", FOLDERS))
    assert made == ["algo.", "algo="]
    inner = list(overrides("algo.", FOLDERS))
    assert {"algo.kl.", "algo.epochs="} <= set(inner)
    assert all(one.removeprefix("algo.").count(".") <= 1 for one in inner)


@pytest.mark.parametrize(
    "script, line, expected",
    [
        ("train", "ppo-ds-train +experiment=rlhf_70b_", "rlhf_70b_lora"),
        ("train", "ppo-ds-train --config-d", "--config-dir"),
        ("export", "ppo-ds-export --role em", "ema"),
        ("evaluate", "ppo-ds-evaluate --sam", "--samples"),
        ("chat", "ppo-ds-chat --gr", "--greedy"),
        ("chat", "ppo-ds-chat MODEL algo.kl.est", "algo.kl.estimator="),
    ],
)
def test_the_shell_gets_the_completions(script: str, line: str, expected: str) -> None:
    """Speaks the protocol of argcomplete: completions are written to file descriptor 8."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    read, write = os.pipe()
    with os.fdopen(read) as answer:
        command = f'exec 8>&{write} "$@"'
        done = subprocess.run(
            ["bash", "-c", command, "bash", sys.executable, str(ROOT / "launch" / f"{script}.py")],
            env=environment(**asked),
            pass_fds=[write],
            capture_output=True,
            text=True,
        )
        os.close(write)
        assert answer.read().strip() == expected, done.stderr
