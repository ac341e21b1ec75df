"""Tests that at most one run at a time holds the lock of a run directory, however the last run ended."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.errors import UserError
from ppo_ds.storage import run_lock
from ppo_ds.storage.run_lock import NAME, Holder, acquire, check_free

WORKER = Path(__file__).with_name("lock_worker.py")
LIMIT = 60  # seconds until a hang fails the test


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(started: list[subprocess.Popen[str]], run_dir: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(run_dir), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return process


def said(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def write_note(run_dir: Path, **content: Any) -> None:
    """Writes a lock file that nobody holds, as a killed holder leaves it."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / NAME).write_text(json.dumps(asdict(Holder(**content))))


def race(run_dir: Path, gate: Any, answers: Any, done: Any) -> None:
    """Takes a lock when all racers are ready, and holds it until all have answered."""
    gate.wait()
    try:
        lock = acquire(run_dir)
        answers.put(os.getpid())
        done.wait()
        lock.release()
    except UserError:
        answers.put(None)


@pytest.mark.parametrize("left", ["no directory", "no lock", "a stale lock", "a damaged lock"])
def test_of_eight_starts_at_once_exactly_one_holds_the_lock(tmp_path: Path, left: str) -> None:
    fork = multiprocessing.get_context("fork")
    for attempt in range(5):
        run_dir = tmp_path / str(attempt)
        if left != "no directory":
            run_dir.mkdir()
        if left == "a stale lock":
            write_note(run_dir)
        elif left == "a damaged lock":
            (run_dir / NAME).write_text("?")
        gate, answers, done = fork.Barrier(8), fork.SimpleQueue(), fork.Event()
        racers = [fork.Process(target=race, args=(run_dir, gate, answers, done)) for _ in range(8)]
        for racer in racers:
            racer.start()
        found = [answers.get() for _ in racers]
        (holder,) = [pid for pid in found if pid]
        assert json.loads((run_dir / NAME).read_text())["pid"] == holder
        done.set()
        for racer in racers:
            racer.join(LIMIT)
        assert not run_dir.exists() or not list(run_dir.iterdir())


class Clock:
    """Replaces this process's clock and sleep: time passes only in ``sleep``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seconds, self.sleeps = 0.0, 0
        # actions by the number of the sleep in which they happen
        self.at_sleep: dict[int, Callable[[], object]] = {}
        monkeypatch.setattr(run_lock.time, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(run_lock.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.seconds, self.sleeps = self.seconds + seconds, self.sleeps + 1
        self.at_sleep.pop(self.sleeps, lambda: None)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_second_start_is_refused_within_two_seconds_with_one_line(
    tmp_path: Path, started: list[subprocess.Popen[str]], clock: Clock
) -> None:
    holder = start(started, tmp_path / "run")
    assert said(holder) == "held"
    with pytest.raises(UserError) as refused:
        acquire(tmp_path / "run")
    assert clock.seconds < 2
    (line,) = refused.value.problems
    since = time.strftime("%Y-%m-%d %H:")
    assert line.startswith(
        f"run.dir={tmp_path / 'run'}: is in use by a run on {os.uname().nodename}, process "
    )
    assert f"process {holder.pid}, since {since}" in line
    assert line.endswith("wait until it ends or stop it, or choose another run.dir or run.name")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]


def test_a_refused_start_touches_nothing_under_any_name_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").symlink_to("run")
    lock = acquire(tmp_path / "run")
    before = (tmp_path / "run").stat().st_mtime_ns, (tmp_path / "run" / NAME).read_bytes()
    for name in ("run", "other"):
        with pytest.raises(UserError, match=f"{name}: is in use by"):
            acquire(tmp_path / name)
    assert ((tmp_path / "run").stat().st_mtime_ns, (tmp_path / "run" / NAME).read_bytes()) == before
    lock.release()
    acquire(tmp_path / "other").release()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "parent is a file"])
def test_what_is_no_lock_file_is_refused(tmp_path: Path, kind: str) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "run" / NAME
    if kind == "parent is a file":
        run_dir.touch()
    else:
        run_dir.mkdir()
        make = {"link": lambda: path.symlink_to(tmp_path / "target"), "folder": path.mkdir}
        make.get(kind, lambda: os.mkfifo(path))()
    with pytest.raises(UserError, match=r"run.dir=.*cannot be written"):
        acquire(run_dir)
    assert not (tmp_path / "target").exists()


def test_a_directory_that_cannot_be_created_is_refused() -> None:
    """Directories in /proc cannot be created: the error is that of a directory that was just removed."""
    with pytest.raises(UserError, match=r"run.dir=/proc/none/run: cannot be written: No such file"):
        acquire(Path("/proc/none/run"))


def test_the_lock_of_a_killed_process_is_taken(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    holder = start(started, tmp_path)
    assert said(holder) == "held"
    os.kill(holder.pid, signal.SIGKILL)
    acquire(tmp_path).release()  # possible even before the parent has read the exit code
    holder.wait()
    holder = start(started, tmp_path)
    assert said(holder) == "held"
    tell(holder, "leave")
    holder.wait()
    assert (tmp_path / NAME).exists()
    acquire(tmp_path).release()


def test_a_child_that_outlives_a_killed_holder_does_not_keep_its_lock(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    holder = start(started, tmp_path)
    assert said(holder) == "held"
    tell(holder, "fork")  # the child also tries to release it
    child = int(said(holder))
    assert (tmp_path / NAME).exists()
    holder.kill()
    holder.wait()
    try:
        acquire(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.fixture(params=["another machine", "no locks", "another machine, no locks"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a lock whose holder the kernel cannot vouch for."""
    if "no locks" in request.param:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    write_note(tmp_path, **({"machine": "x"} if "another" in request.param else {}))


def test_elsewhere_60_seconds_without_renewal_decide(tmp_path: Path, elsewhere: None, clock: Clock) -> None:
    lines: list[str] = []
    lock = acquire(tmp_path, notice=lines.append)
    assert 60 < clock.seconds < 61
    assert len(lines) == 1 and "waiting up to 60 s for the end of a run on" in lines[0]
    # the new holder renews its lock, which refuses the next start
    clock.at_sleep[clock.sleeps + 3] = lambda: os.utime(tmp_path / NAME, (1.0, 1.0))
    with pytest.raises(UserError, match="is in use by a run on"):
        acquire(tmp_path, notice=lines.append)
    assert clock.seconds < 63
    lock.release()
    assert not (tmp_path / NAME).exists()


def test_a_lock_dated_in_the_future_is_taken_like_any_other(
    tmp_path: Path, elsewhere: None, clock: Clock
) -> None:
    """A clock that was set back after a crash gives a lock a time that this clock reaches in years."""
    os.utime(tmp_path / NAME, (4e9, 4e9))
    clock.at_sleep[1000] = lambda: pytest.fail("the start waits for more than 60 s")
    acquire(tmp_path).release()
    assert 60 < clock.seconds < 61


def test_a_lock_of_this_machine_dated_in_the_future_is_taken_at_once(tmp_path: Path, clock: Clock) -> None:
    write_note(tmp_path, since=4e9)
    os.utime(tmp_path / NAME, (4e9, 4e9))
    acquire(tmp_path).release()
    assert clock.seconds == 0


@pytest.mark.parametrize("since", [1e17, 1e300, -1e300, float("nan"), float("inf")])
def test_an_absurd_time_in_a_lock_is_no_time(tmp_path: Path, clock: Clock, since: float) -> None:
    lock = acquire(tmp_path)
    write_note(tmp_path, since=since)
    with pytest.raises(UserError, match="is in use by a run whose lock cannot be read"):
        acquire(tmp_path)
    lock.release()


@pytest.mark.parametrize("content", ["", '{"pid": "x"}', '["a"]', "\0", '{"pid": 1e999}'])
def test_a_damaged_file_is_no_lock(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    lock = acquire(tmp_path)
    (tmp_path / NAME).write_text(content)
    with pytest.raises(UserError, match="is in use by a run whose lock cannot be read"):
        acquire(tmp_path)
    lock.release()


def test_a_start_waits_for_a_holder_that_is_ending(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    holder = start(started, tmp_path)
    assert said(holder) == "held"
    tell(holder, "ending")
    assert said(holder) == "marked"
    next_one = start(started, tmp_path)
    assert said(next_one).startswith(f"run.dir={tmp_path}: waiting up to 60 s for the end of a run on")
    tell(holder, "release")
    assert said(next_one) == "held"
    assert holder.wait(LIMIT) == 0


def test_the_wait_for_a_holder_that_is_ending_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = acquire(tmp_path)
    lock.mark_ending()
    monkeypatch.setattr(run_lock, "ENDING", 1.5)
    lines: list[str] = []
    with pytest.raises(UserError, match=r"is still in use by .*, which has not ended within 2 s; "):
        acquire(tmp_path, notice=lines.append)
    assert len(lines) == 1
    lock.release()


def test_the_holder_renews_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "RENEWAL", 0.05)
    lock = acquire(tmp_path)
    lock.start_renewal(pytest.fail)
    os.utime(tmp_path / NAME, (1.0, 1.0))
    wait_until(lambda: (tmp_path / NAME).stat().st_mtime > 1.0)
    lock.release()
    time.sleep(0.2)
    assert not (tmp_path / NAME).exists()


def test_a_holder_learns_that_another_run_has_taken_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a process that was suspended for more than 60 s, so that another run replaced its lock."""
    monkeypatch.setattr(run_lock, "RENEWAL", 0.05)
    lock, lines = acquire(tmp_path), []
    (tmp_path / NAME).unlink()
    other = acquire(tmp_path)
    lock.start_renewal(lines.append)
    wait_until(lambda: lines)
    assert "another run has taken the lock of this run" in lines[0]
    lock.release()
    assert (tmp_path / NAME).exists()  # the other run's lock
    other.release()
    assert not (tmp_path / NAME).exists()


def test_only_the_directories_that_a_lock_has_made_are_removed_with_it(tmp_path: Path) -> None:
    acquire(tmp_path / "a" / "b").release()
    assert not (tmp_path / "a").exists()
    lock = acquire(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "a" / "metrics.jsonl").touch()
    lock.release()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["metrics.jsonl"]
    (tmp_path / "empty").mkdir()
    acquire(tmp_path / "empty").release()
    assert (tmp_path / "empty").is_dir()


def test_other_ranks_are_refused_by_another_launch_only(tmp_path: Path) -> None:
    check_free(tmp_path, "mine")
    lock = acquire(tmp_path, "mine")
    check_free(tmp_path, "mine")
    with pytest.raises(UserError, match="is in use by a run on"):
        check_free(tmp_path, "another")
    lock.mark_ending()
    check_free(tmp_path, "another")  # allowed, since rank 0 waits for the end of the other run
    lock.release()
    write_note(tmp_path, launch="mine")
    check_free(tmp_path, "another")  # allowed, since nobody holds the lock


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
