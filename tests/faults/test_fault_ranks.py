"""Tests ranks that fail, die or hang: the messages, the exit codes, and that no process remains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.launching import TIMEOUT, command
from tests.integration.test_launchers import SMALL
from tests.support.environment import environment

SOON = 60.0  # seconds; ranks end within 3 to 7 on an idle machine, or after HANG if they wait for each other
HANG = 240.0  # seconds until ranks that do not end are killed


@dataclass
class Ended:
    """Holds how the two ranks of a run ended."""

    codes: list[int]
    seconds: float  # from the last sign of life of any rank to the end
    text: str  # output of both ranks
    folder: Path

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture
def run(rank_server, tmp_path):
    def run(case="", fault=None, minutes=5.0):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        surroundings = {"TIMEOUT_MINUTES": str(minutes)} | ({"PPO_DS_FAULT": fault} if fault else {})
        group = rank_server.start(
            "tests.faults.fault_ranks_worker:of_this_test",
            2,
            str(folder),
            case,
            log=folder / "output",
            **surroundings,
        )
        codes = rank_server.wait(group, limit=HANG, grace=None)
        signs = [float(file.read_text()) for file in folder.glob("sign?")]
        seconds = time.time() - max(signs, default=time.time())
        return Ended(codes, seconds, group.output(), folder)

    return run


def test_good_runs_return_0_and_say_nothing(run):
    ended = [run("late" if i == 0 else "") for i in range(4)]
    assert [one.codes for one in ended] == [[0, 0]] * 4
    assert {one.text for one in ended} == {""}


def test_a_straggler_shows_in_the_spread_of_the_ranks_own_seconds(run):
    ended = run(fault="slow@reward:rank=1:at=2:seconds=1")
    found = [
        [float(line) for line in (ended.folder / f"spread{rank}").read_text().split()] for rank in range(2)
    ]
    assert ended.codes == [0, 0] and found[0] == found[1] and len(found[0]) == 3
    # time spent waiting for peers is excluded; with it, the steps of both ranks took equally long
    assert found[0][1] > 0.5
    assert min(found[0]) >= 0


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_with_its_traceback_first(run, rank):
    ended = run(fault=f"raise@reward:at=2:rank={rank}")
    assert ended.codes == [1, 1] and ended.seconds < SOON
    assert ended.lines[:2] == [f"rank {rank} failed:", "Traceback (most recent call last):"], ended.text
    assert ended.lines[-2:] == [
        "RuntimeError: fault at reward",
        f"rank {1 - rank}: stopped because rank {rank} failed (RuntimeError: fault at reward)",
    ]
    assert ended.text.count("Traceback") == 1 and "in _work" in ended.text
    # rank 0 closes the record of the run in both cases
    assert "fault at reward" in (ended.folder / "record0").read_text()


def test_the_same_exception_on_all_ranks_is_told_once(run):
    ended = run(fault="raise@update")
    assert ended.codes == [1, 1]
    assert ended.text.count("Traceback") == 1 and ended.text.count("RuntimeError: fault at update") == 2, (
        ended.text
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_by_the_others_which_leave(run, rank):
    """Kills rank 0, which hosts the store of the notices, or rank 1.

    The connection errors that follow the loss of the store must not be printed.
    """
    ended = run(fault=f"kill@generate:rank={rank}")
    assert ended.codes[rank] == -signal.SIGKILL and ended.codes[1 - rank] == 1 and ended.seconds < SOON
    (line,) = ended.lines
    assert line.startswith(
        f"rank {1 - rank}: stopped because rank {rank} failed (its process died without an error message"
    ), ended.text


def test_a_mistake_that_one_rank_finds_is_told_once_and_is_exit_code_2_on_all(run):
    for case in ("mistake on one", "mistake on all"):
        ended = run(case)
        assert ended.codes == [2, 2] and ended.seconds < SOON
        assert ended.lines == [
            "error: data.path=x.jsonl:7: no prompt",
            "error: reward.path=y: no such file",
        ], case


def told_by_the_stuck(text):
    """Returns the reports of ranks 0 and 1 on their phase and stack; their order in the output is random."""
    parts = re.split(r"rank (\d): stuck", text)[1:]
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    return told["0"], told["1"]


def test_a_stuck_rank_ends_all_with_phase_and_stack_of_each(run):
    ended = run(fault="hang@update:at=2:rank=1", minutes=0.05)
    assert ended.codes == [1, 1] and 3 < ended.seconds < SOON
    first, second = told_by_the_stuck(ended.text)
    why = (
        "no progress on any rank for 3 s; run.timeout_minutes=0.05 is the limit: "
        "raise it if the run was only slow"
    )
    assert first.startswith(
        f" ({why}); this rank is after the phase 'update' since "
    )  # rank 0 waits for rank 1, and so makes no progress either
    assert "in fit\n" in first and "all_reduce" in first  # rank 0 waits there for rank 1
    assert "this rank is in the phase 'update' since " in second
    assert "in _work\n" in second and "in fault\n" in second and "all_reduce" not in second
    assert (ended.folder / "record0").read_text().count("\n") == 0


def test_a_rank_that_never_gives_up_the_interpreter_shows_where_it_is_too(run):
    ended = run("greedy", minutes=0.05)
    assert ended.codes == [1, 1] and ended.seconds < SOON
    assert "rank 0: stuck" in ended.text and "rank 1: stuck" not in ended.text
    dumped = ended.text.partition("Timeout (")[2]
    assert "in _work" in dumped and "all_reduce" not in dumped, ended.text


# -- under launchers -------------------------------------------------------------------------------


def launched(arguments, cwd, **more):
    """Returns (exit code, output) of a launcher and asserts that none of its processes remains."""
    process = subprocess.Popen(
        arguments,
        cwd=cwd,
        env=environment() | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # returns once all processes that write to the pipe have ended
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            left = True
        except ProcessLookupError:
            left = False
    assert not left, output
    return process.returncode, output


@pytest.mark.slow
def test_the_trainer_with_a_rank_that_hangs(tmp_path):
    stuck = {"PPO_DS_FAULT": "hang@reward:rank=1"}
    code, output = launched(
        command("deepspeed", *SMALL, "run.steps=1", "run.timeout_minutes=0.2"), tmp_path, **stuck
    )
    assert code == 1 and "Traceback" not in output, output
    rank_0, rank_1 = told_by_the_stuck(output)
    # at the end of the phase, the ranks tell one another whether one of them is out of memory
    assert "this rank is in the phase 'reward' since" in rank_0
    assert "in _any_failed\n" in rank_0 and "all_reduce" in rank_0
    assert (
        "this rank is in the phase 'reward' since" in rank_1
        and "in collect\n" in rank_1
        and "all_reduce" not in rank_1
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == "error"
