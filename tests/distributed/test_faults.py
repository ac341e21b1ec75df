"""The hook that the tests of faults stand on: it fires where, when and on the rank it is told, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ppo_ds.distributed import faults
from ppo_ds.distributed.faults import fault


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    faults._reached.clear()
    monkeypatch.setenv("RANK", "1")


def reached(place: str, times: int) -> list[bool]:
    return [fault(place) for _ in range(times)]


def test_unset_it_does_nothing(monkeypatch):
    monkeypatch.delenv("PPO_DS_FAULT", raising=False)
    assert reached("a", 3) == [False] * 3


@pytest.mark.parametrize(
    ("asked", "fired"),
    [
        ("nan@a", [True, False, False]),
        ("nan@a:at=2", [False, True, False]),
        ("nan@a:at=2:times=0", [False, True, True]),
        ("nan@a:times=2", [True, True, False]),
        ("nan@a:rank=1", [True, False, False]),
        ("nan@a:rank=0", [False] * 3),
        ("nan@b", [False] * 3),
        ("nan@b nan@a:at=3", [False, False, True]),
    ],
)
def test_when_and_where(monkeypatch, asked, fired):
    monkeypatch.setenv("PPO_DS_FAULT", asked)
    assert reached("a", 3) == fired


def test_errors(monkeypatch):
    monkeypatch.setenv("PPO_DS_FAULT", "raise@a full@b")
    with pytest.raises(RuntimeError, match="fault at a"):
        fault("a")
    with pytest.raises(OSError, match="No space left"):
        fault("b")


@pytest.mark.parametrize(("asked", "code"), [("kill@a", -9), ("stop@a", -15)])
def test_signals(asked, code):
    environment = {"PPO_DS_FAULT": asked, "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", "from ppo_ds.distributed.faults import fault; fault('a')"],
        env=environment,
        check=False,
    )
    assert ended.returncode == code


def test_a_misspelt_action_is_no_silent_success(monkeypatch):
    monkeypatch.setenv("PPO_DS_FAULT", "kil@a")
    with pytest.raises(AssertionError, match="no such action"):
        fault("a")
