"""Tests the watchdog with a simulated clock: hangs, failures of peers and the loss of the store.

tests/faults has tests with real ranks that fail, die or hang.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.distributed import heartbeat, watchdog
from ppo_ds.distributed.open_files import raise_open_files_limit
from ppo_ds.distributed.store import StoreClosed, StoreSilent
from ppo_ds.distributed.watchdog import Process, Watchdog
from ppo_ds.run.timing import PhaseTimer


class Exited(BaseException):
    """Raised by the simulated exit."""


class FakeStore:
    def __init__(self):
        self.values, self.counts, self.available, self.silent = {}, {}, True, False

    def _expect_available(self):
        if self.silent:
            raise StoreSilent
        if not self.available:
            raise StoreClosed

    def put(self, key, value):
        self._expect_available()
        self.values[key] = value

    def get(self, key):
        self._expect_available()
        return self.values.get(key)

    def add(self, key, amount=1):
        self._expect_available()
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


class FakeProcess:
    """Simulates the operations of watchdog.Process and records the calls."""

    def __init__(self):
        self.now, self.written, self.hard_exits = 1000.0, [], []

    def sleep(self, seconds):
        self.now += seconds

    def exit(self, code):
        raise Exited(code)

    def as_process(self):
        return Process(lambda: self.now, self.sleep, self.exit, self.written.append, self.hard_exits.append)


class Rank1Of2:
    """Connects the watchdog of rank 1 to a simulated store, without its thread."""

    def __init__(self):
        self.process, self.store = FakeProcess(), FakeStore()
        self.watchdog = Watchdog(self.process.as_process())
        # rank 0 is on another machine
        world = SimpleNamespace(rank=1, size=2, gather_objects=lambda own: [("another machine", 1), own])
        self.watchdog.connect(world, self.store)

    def check(self, times, seconds=0.5):
        for _ in range(times):
            self.process.now += seconds
            self.watchdog.check()

    @property
    def failure(self):
        return json.loads(self.store.values["failure"]) if "failure" in self.store.values else None


@pytest.fixture
def rank():
    return Rank1Of2()


def test_a_silence_as_long_as_the_limit_is_a_hang(rank):
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    rank.check(1)
    rank.check(12)
    assert rank.failure is None
    rank.check(1)
    reason = (
        "no progress on rank 1 for 6 s; run.timeout_minutes=0.1 is the limit: "
        "raise it if the run was only slow"
    )
    assert rank.failure == {"rank": 1, "reason": reason, "code": 1, "stuck": True, "quiet": False}
    with pytest.raises(Exited):  # the next check, on any rank, reports the failure
        rank.check(1)
    written = rank.process.written[0]
    assert written.startswith(f"rank 1: stuck ({reason}); this rank is ") and "in check\n" in written


def test_no_rank_is_blamed_if_all_are_silent(rank):
    rank.store.add("stalled0")  # rank 0 has also found that there is no progress
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    rank.check(14)
    assert rank.failure["reason"].startswith("no progress on any rank for 6 s; run.timeout_minutes=0.1 ")


def test_a_process_that_was_suspended_itself_is_no_hang(rank):
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    rank.check(3)
    rank.check(1, seconds=3600.0)
    assert rank.failure is None


def test_the_hard_exit_is_postponed_while_checks_go_on(rank):
    """The hard exit is a timer without the GIL, 5 s after the limit. Progress must keep it from firing."""
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    for _ in range(10):
        rank.check(6)
        heartbeat.beat()
    assert set(rank.process.hard_exits) == {11.0}
    assert len(rank.process.hard_exits) == 11  # set every 3 s of 30 s, and once at the start


def test_the_loss_of_rank_0s_store_means_that_rank_0_failed(rank, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    rank.store.available = False
    with pytest.raises(Exited):
        rank.watchdog.check()
    assert rank.process.written[0].startswith("rank 1: stopped because rank 0 failed")


def test_the_loss_of_a_launchers_store_leaves_the_rank_running_until_the_timeout(rank, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    calls = []
    rank.watchdog.add_callback(lambda: calls.append(True))
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    rank.store.available = False
    rank.check(10)
    assert len(calls) == 10 and not rank.process.written
    with pytest.raises(Exited):
        rank.check(10)
    assert "stuck" in rank.process.written[0]


def test_a_failure_of_another_rank_ends_this_one_with_its_code_and_closes_the_record(rank):
    closed = []
    rank.watchdog.set_timeout(0.1, closed.append)
    published = {"rank": 0, "reason": "ValueError: x", "code": 2, "stuck": False, "quiet": False}
    rank.store.put("failure", json.dumps(published))
    rank.store.add("failure_acks")  # rank 0's acknowledgement
    with pytest.raises(Exited) as exited:
        rank.watchdog.check()
    assert exited.value.args == (2,)
    assert rank.process.written == ["rank 1: stopped because rank 0 failed (ValueError: x)"]
    assert closed == ["stopped because rank 0 failed (ValueError: x)"]
    assert rank.store.counts["failure_acks"] == 2


@pytest.mark.parametrize("published", [True, False])
def test_only_the_first_rank_to_fail_reports_its_error_unless_it_has_ended_before(rank, published):
    rank.store.add("failure_claims")  # rank 0 has failed first
    if published:
        rank.watchdog._ending.set()  # the thread has read the failure while this rank sleeps
    with pytest.raises(Exited):
        rank.watchdog.fail("traceback", "RuntimeError: a consequence", 1)
    assert rank.process.written == ([] if published else ["traceback"]) and rank.failure is None


def test_a_hang_is_reported_even_if_the_first_rank_to_find_it_ended_before_it_published_it(rank):
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    rank.store.add("failure_claims")  # by rank 0, which has ended
    rank.check(30)  # 6 s until the hang and 9 s for rank 0 to publish it
    assert rank.process.written == [] and rank.failure is None
    with pytest.raises(Exited):
        rank.check(2)
    assert rank.process.written[0].startswith("rank 1: stuck (no progress on rank 1 for 6 s;")


def test_an_error_while_the_process_ends_because_of_another_rank_is_not_reported(rank):
    published = {"rank": 0, "reason": "no progress", "code": 1, "stuck": True, "quiet": False}
    rank.store.put("failure", json.dumps(published))
    rank.store.add("failure_acks")
    with pytest.raises(Exited):
        rank.watchdog.check()
    (description,) = rank.process.written
    rank.store.available = False  # rank 0 has ended, which closes its connections and its store
    with pytest.raises(Exited):
        rank.watchdog.fail("traceback", "RuntimeError: Connection closed by peer", 1)
    assert rank.process.written == [description]


def test_the_end_of_a_peer_is_noticed_if_its_descriptor_is_above_1023(monkeypatch):
    raise_open_files_limit(1)
    ends, closes = os.pipe()
    peer = fcntl.fcntl(ends, fcntl.F_DUPFD, 1500)  # becomes readable when the other end is closed
    monkeypatch.setattr(watchdog, "local_peers", lambda world: {peer: 0})
    monkeypatch.setattr(watchdog, "POLL", 0.0)
    rank = Rank1Of2()
    rank.store.add("failure_acks")  # rank 0 has ended, so that no other rank is waited for
    try:
        rank.watchdog._poll_peers()
        assert rank.process.written == []
        os.close(closes)
        with pytest.raises(Exited):
            rank.watchdog._poll_peers()
    finally:
        os.close(ends)
        os.close(peer)
    assert rank.process.written[0].startswith("rank 1: stopped because rank 0 failed (its process died")


def test_a_suspended_peer_is_named_without_a_call_of_the_store_that_it_may_hold(monkeypatch):
    process = subprocess.Popen(["sleep", "1000"])
    peer = os.pidfd_open(process.pid)
    monkeypatch.setattr(watchdog, "local_peers", lambda world: {peer: 0})
    try:
        rank = Rank1Of2()
        assert rank.watchdog._suspended_peer() is None
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        rank.store = rank.watchdog._store = None  # a call would fail
        rank.watchdog._silent = rank.watchdog._limit = 60.0
        rank.watchdog._beats, rank.watchdog._last_check = heartbeat.read().beats, -10.0
        with pytest.raises(Exited):
            rank.watchdog.check()
        process.kill()
        process.wait()
        assert rank.watchdog._suspended_peer() is None
    finally:
        process.kill()
        os.close(peer)
    assert "no progress on rank 0, which is suspended, for 60 s" in rank.process.written[0]


def test_a_store_that_does_not_answer_is_a_hang_only_after_the_limit(rank):
    """Rank 0, on another machine, is suspended; a check then takes as long as the wait for the store."""
    rank.watchdog.set_timeout(0.1, lambda reason: None)
    rank.check(1)
    rank.store.silent = True
    rank.check(2, seconds=2.5)
    assert rank.process.written == []
    with pytest.raises(Exited):
        rank.check(1, seconds=2.5)
    assert rank.process.written[0].startswith("rank 1: stuck (no progress on rank 1 for 6 s;")


def test_phases_set_the_heartbeat():
    timer = PhaseTimer(torch.device("cpu"))
    beats = heartbeat.read().beats
    with timer("eval"):
        outer = heartbeat.read()
        assert outer.phase == "in the phase 'eval'"
        with timer("switch"):
            assert heartbeat.read().phase == "in the phase 'switch'"
        assert (heartbeat.read().phase, heartbeat.read().since) == (outer.phase, outer.since)
    assert heartbeat.read().phase == "after the phase 'eval'" and heartbeat.read().beats == beats + 4


def test_work_of_a_phase_is_counted(monkeypatch):
    # work that an earlier test interrupted may still be counted
    monkeypatch.setattr(heartbeat, "_current", heartbeat.Heartbeat())
    heartbeat.enter("updating")
    with heartbeat.counting(8, "optimizer steps") as steps:
        steps(3)
        with pytest.raises(ZeroDivisionError), heartbeat.counting(4, "micro-batches") as micros:
            micros(1)
            before = heartbeat.enter("in the phase 'update_actor'")
            assert heartbeat.read().work == (
                heartbeat.Work(3, 8, "optimizer steps"),
                heartbeat.Work(1, 4, "micro-batches"),
            )
            heartbeat.enter(*before)
            1 / 0  # noqa: B018
        assert heartbeat.read().work == (heartbeat.Work(3, 8, "optimizer steps"),)
    assert heartbeat.read().work == () and heartbeat.read().phase == "updating"
