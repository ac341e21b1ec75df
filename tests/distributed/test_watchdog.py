"""The watching thread's decisions, in this process: what counts as stuck, and what it does without the store. Ranks that die: tests/faults."""

from __future__ import annotations

import faulthandler
import json
import time
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.distributed import watchdog as module
from ppo_ds.distributed.heartbeat import HEARTBEAT, sign
from ppo_ds.distributed.store import StoreUnavailable
from ppo_ds.distributed.watchdog import Watchdog
from ppo_ds.training.timing import PhaseTimer


class Left(BaseException):
    """Instead of the end of this process."""


class Board:
    def __init__(self):
        self.texts, self.counts, self.gone = {}, {}, False

    def _reached(self):
        if self.gone:
            raise StoreUnavailable

    def put(self, name, text):
        self._reached()
        self.texts[name] = text

    def get(self, name):
        self._reached()
        return self.texts.get(name)

    def count(self, name, more=1):
        self._reached()
        self.counts[name] = self.counts.get(name, 0) + more
        return self.counts[name]


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(
        module, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0], "sleep": sleep})
    )
    return now


@pytest.fixture
def watch(monkeypatch, clock):
    """That of rank 1 of 2, without its thread."""

    def exit_now(code):
        raise Left(code)

    said = []
    monkeypatch.setattr(module, "exit_now", exit_now)
    monkeypatch.setattr(module, "say", said.append)
    monkeypatch.setattr(module, "local_peers", lambda world: {})
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
    watch = Watchdog()
    monkeypatch.setattr(watch._thread, "start", lambda: None)
    watch.start(SimpleNamespace(rank=1, size=2), Board())
    watch.said = said
    return watch


def looks(watch, clock, count, seconds=0.5, meanwhile=lambda: None):
    for _ in range(count):
        clock[0] += seconds
        meanwhile()
        watch._look()


def test_silence_is_a_hang_once_it_has_lasted_for_the_limit(watch, clock):
    watch.guard(0.1, lambda why: None)
    looks(watch, clock, 1)
    looks(watch, clock, 12)
    assert not watch._notices.texts
    looks(watch, clock, 1)
    failure = json.loads(watch._notices.texts["failure"])
    why = "no sign of life from rank 1 for 6 s; run.timeout_minutes=0.1 is the limit: raise it if this was only slow"
    assert failure == {"rank": 1, "why": why, "code": 1, "stuck": True, "quiet": False}
    with pytest.raises(Left):  # the next look reports, like that of every other rank
        looks(watch, clock, 1)
    assert watch.said[0].startswith(f"rank 1: stuck ({why}); this one is ") and "in looks\n" in watch.said[0]


def test_no_rank_is_blamed_where_all_are_as_silent(watch, clock):
    watch._notices.count("silent0")  # rank 0 has found the same of itself
    watch.guard(0.1, lambda why: None)
    looks(watch, clock, 14)
    assert json.loads(watch._notices.texts["failure"])["why"].startswith(
        "no sign of life from any rank for 6 s; run.timeout_minutes=0.1 "
    )


def test_each_sign_starts_the_silence_anew(watch, clock):
    watch.guard(0.1, lambda why: None)
    for _ in range(5):
        looks(watch, clock, 10)
        sign()
    assert not watch._notices.texts


def test_while_nothing_is_guarded_silence_means_nothing(watch, clock):
    looks(watch, clock, 100)
    assert not watch._notices.texts


def test_a_process_that_stood_still_itself_is_not_stuck(watch, clock):
    """Suspended for an hour, as a whole: its loop had no chance of a sign."""
    watch.guard(0.1, lambda why: None)
    looks(watch, clock, 3)
    looks(watch, clock, 1, seconds=3600.0)
    assert not watch._notices.texts


def test_without_rank_0s_store_it_is_rank_0_that_failed(watch, clock, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    watch._notices.gone = True
    with pytest.raises(Left):
        watch._look()
    assert watch.said[0].startswith("rank 1: ended, since rank 0 failed")


def test_without_the_store_of_a_launcher_it_goes_on_to_stop_by_itself(watch, clock, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    looked = []
    watch.look_also(lambda: looked.append(True))
    watch.guard(0.1, lambda why: None)
    watch._notices.gone = True
    looks(watch, clock, 10)
    assert len(looked) == 10 and not watch.said
    with pytest.raises(Left):  # but not for ever
        looks(watch, clock, 10)
    assert "stuck" in watch.said[0]


def test_phases_say_where_this_is():
    timer = PhaseTimer(torch.device("cpu"))
    before = HEARTBEAT.signs
    with timer("eval"):
        assert HEARTBEAT.place == "in the phase 'eval'"
        began = HEARTBEAT.since
        with timer("switch"):
            assert HEARTBEAT.place == "in the phase 'switch'"
        assert (HEARTBEAT.place, HEARTBEAT.since) == ("in the phase 'eval'", began)
    assert HEARTBEAT.place == "after the phase 'eval'" and HEARTBEAT.signs == before + 4
