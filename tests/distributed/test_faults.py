"""Tests that fault injection acts at the requested place, visit and rank, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ppo_ds.distributed import faults
from ppo_ds.distributed.faults import fault


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    faults.visits.clear()
    monkeypatch.setenv("RANK", "1")


def visit(place: str, times: int) -> list[bool]:
    """Returns whether each visit raised."""
    return [raises(place) for _ in range(times)]


def raises(place: str) -> bool:
    try:
        fault(place)
    except RuntimeError:
        return True
    return False


def test_nothing_happens_without_the_variable(monkeypatch):
    monkeypatch.delenv("PPO_DS_FAULT", raising=False)
    assert visit("a", 3) == [False] * 3


@pytest.mark.parametrize(
    ("requested", "fired"),
    [
        ("raise@a", [True, False, False]),
        ("raise@a:at=2", [False, True, False]),
        ("raise@a:at=2:times=0", [False, True, True]),
        ("raise@a:times=2", [True, True, False]),
        ("raise@a:rank=1", [True, False, False]),
        ("raise@a:rank=0", [False] * 3),
        ("raise@b", [False] * 3),
        ("raise@b raise@a:at=3", [False, False, True]),
    ],
)
def test_visits_and_ranks(monkeypatch, requested, fired):
    monkeypatch.setenv("PPO_DS_FAULT", requested)
    assert visit("a", 3) == fired


def test_slow_sleeps_for_the_given_seconds(monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    monkeypatch.setenv("PPO_DS_FAULT", "slow@a:rank=1:seconds=2.5")
    assert visit("a", 2) == [False] * 2 and slept == [2.5]


def test_errors(monkeypatch):
    monkeypatch.setenv("PPO_DS_FAULT", "raise@a full@b")
    with pytest.raises(RuntimeError, match="fault at a"):
        fault("a")
    with pytest.raises(OSError, match="No space left"):
        fault("b")


@pytest.mark.parametrize(("requested", "code"), [("kill@a", -9), ("stop@a", -15)])
def test_signals(requested, code):
    environment = {"PPO_DS_FAULT": requested, "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", "from ppo_ds.distributed.faults import fault; fault('a')"],
        env=environment,
        check=False,
    )
    assert ended.returncode == code


def test_an_unknown_action_is_an_error(monkeypatch):
    monkeypatch.setenv("PPO_DS_FAULT", "kil@a")
    with pytest.raises(AssertionError, match="no such action"):
        fault("a")
