"""One for all: a thread on each rank that ends it where another rank has failed or died, or where the run is stuck.

A rank that waits in a collective cannot see any of this by itself: gloo breaks with an error of its own, which would hide the cause, NCCL waits
until its timeout. The first rank to fail says so, and everybody hears of it within a second (distributed/store.py); a process that ends without a
word is seen by the ranks on the same machine. A machine that is lost altogether shows as a run that is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ppo_ds.distributed.heartbeat import HEARTBEAT, exit_now, within
from ppo_ds.distributed.store import RankStore, StoreUnavailable
from ppo_ds.distributed.world import World

POLL = 0.5  # seconds between two looks
WORD = 2.0  # seconds that a rank with an error waits for word of one that failed before it, and maybe made it fail
HEARD = 3.0  # seconds at most that ranks stay for the others to hear why: one of them holds the store
CLOSING = 3.0  # seconds for the record of the run to be closed
GRACE = 5.0  # seconds on top, for a rank whose threads no longer run
FAILURE, CLAIM, HEARERS, SILENT = (
    "failure",
    "failures",
    "heard",
    "silent",
)  # names of notices; of the last, with a rank behind it


class Watchdog:
    """Does nothing until ``start``."""

    def __init__(self) -> None:
        self.started = False
        self._limit: float | None = None  # seconds without a sign of life
        self._silent = (
            0.0  # such seconds that this thread has witnessed: none while the whole process stood still
        )
        self._signs = -1
        self._looked = self._armed = -float("inf")
        self._also: list[Callable[[], None]] = []
        self._close_record: Callable[[str], None] = lambda why: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self, world: World, notices: RankStore) -> None:
        """A collective."""
        self._rank, self._size, self._notices = world.rank, world.size, notices
        self._mates = local_peers(world)
        self.started = True
        self._thread.start()

    def look_also(self, look: Callable[[], None]) -> None:
        """Has the thread call it about twice a second from now on. It must return soon, and be no collective."""
        self._also.append(look)

    def guard(self, minutes: float, close_record: Callable[[str], None]) -> None:
        """From now on so many minutes without a sign of life end the run. ``close_record`` is told why this rank ends for another's sake."""
        self._close_record = close_record
        self._limit = 60 * minutes
        self._arm(self._limit)

    def stop(self) -> None:
        """All went well. Every rank must have come as far, and none may end before all have stopped: one that ends while it is watched has died."""
        if not self.started:
            return
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        for mate in self._mates:
            os.close(mate)

    def fail(self, text: str, why: str, code: int, *, own: bool = False) -> int:
        """This rank ends with an error: prints ``text`` and tells the others, who leave with the same ``code``, as the caller must: it is returned.

        Where another rank was first it ends this one instead, since that one's error is the cause. ``why`` is half a line for the others. ``own``: no
        other rank can have caused it, and ``text`` says all; so the others say nothing.
        """
        if self._size > 1:
            self._claim(code, 0.0 if own else WORD)
        self._stopped.set()  # the others leave as soon as they have heard: to the thread it would look as if they had failed
        say(text if own or self._size == 1 else f"rank {self._rank} failed:\n{text}")
        self._limit = None
        with contextlib.suppress(StoreUnavailable):
            self._put(why, code, quiet=own)
            self._notices.count(HEARERS)
            self._await_hearers(self._size)
        return code

    def _claim(self, code: int, patience: float) -> None:
        """Returns on one rank alone, the first. The thread ends the others meanwhile."""
        time.sleep(patience)
        with contextlib.suppress(StoreUnavailable):
            if self._notices.count(CLAIM) > 1:
                time.sleep(2 * HEARD)
                exit_now(code)

    # -- the thread -----------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._look()
                self._wait()
        except Exception as error:  # nobody would watch any more
            exit_now(self.fail(traceback.format_exc(), f"{type(error).__name__}: {error}", 1))

    def _look(self) -> None:
        try:
            failure = self._notices.get(FAILURE)
        except StoreUnavailable:
            failure = None
            self._store_gone()
        if failure is not None:
            self._hear(**json.loads(failure))
        for look in self._also:
            look()
        if self._limit is not None:
            self._listen(self._limit)

    def _store_gone(self) -> None:
        """Where the launcher held it the ranks are orphans now, which save and end by themselves (training/stopping.py)."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._wait()  # on the same machine it is seen who has ended
            self._end(
                "ended, since rank 0 failed (it holds the store that all ranks met at, and no longer answers)",
                1,
            )

    def _wait(self) -> None:
        ended, _, _ = select.select(list(self._mates), [], [], POLL)
        if ended and not self._stopped.is_set():
            self._mate_ended(self._mates[ended[0]])

    def _hear(self, rank: int, why: str, code: int, stuck: bool, quiet: bool) -> None:
        """Of the first rank to fail, which tells itself what there is to tell. The others say one line, or where they are if the run is stuck."""
        if rank == self._rank and not stuck:
            self._stopped.set()
            return
        with contextlib.suppress(StoreUnavailable):
            self._notices.count(HEARERS)
        self._end(
            self._place(why) if stuck else f"ended, since rank {rank} failed ({why})",
            code,
            hearers=self._size,
            quiet=quiet,
        )

    def _mate_ended(self, rank: int) -> None:
        """A process is gone. What it had to say it has said before."""
        why = "its process has ended without a word; killed by the kernel for want of memory?"
        with contextlib.suppress(StoreUnavailable):
            if (failure := self._notices.get(FAILURE)) is not None:
                self._hear(**json.loads(failure))
            self._notices.count(CLAIM)
            self._put(why, 1, rank)
            self._notices.count(HEARERS)
        self._end(f"ended, since rank {rank} failed ({why})", 1, hearers=self._size - 1)

    def _put(
        self, why: str, code: int, rank: int | None = None, stuck: bool = False, quiet: bool = False
    ) -> None:
        failure = {
            "rank": self._rank if rank is None else rank,
            "why": why,
            "code": code,
            "stuck": stuck,
            "quiet": quiet,
        }
        self._notices.put(FAILURE, json.dumps(failure))

    def _await_hearers(self, hearers: int) -> None:
        until = time.monotonic() + HEARD
        while self._notices.count(HEARERS, 0) < hearers and time.monotonic() < until:
            time.sleep(POLL / 5)

    def _end(self, line: str, code: int, hearers: int = 0, quiet: bool = False) -> NoReturn:
        if not quiet:
            say(f"rank {self._rank}: {line}")
        within(CLOSING, lambda: self._close_record(line.partition("\n")[0]))
        with contextlib.suppress(StoreUnavailable):
            self._await_hearers(hearers)
        exit_now(code)

    # -- stuck ------------------------------------------------------------------------------------------------------------------------------

    def _listen(self, limit: float) -> None:
        now = time.monotonic()
        if now - self._armed > GRACE / 2:
            self._arm(limit)
        self._silent = (
            self._silent + min(now - self._looked, 2 * POLL) if self._signs == HEARTBEAT.signs else 0.0
        )
        self._signs, self._looked = HEARTBEAT.signs, now
        if self._silent > limit:
            self._stuck(limit)

    def _stuck(self, limit: float) -> None:
        """The first to find out tells all, itself too, at the next look. It looks about before: ranks that wait for each other are as silent."""
        try:
            self._notices.count(f"{SILENT}{self._rank}")
            if self._notices.count(CLAIM) == 1:
                time.sleep(2 * POLL)
                alike = self._size > 1 and all(
                    self._notices.count(f"{SILENT}{rank}", 0) for rank in range(self._size)
                )
                self._put(_silence("any rank" if alike else f"rank {self._rank}", limit), 1, stuck=True)
        except StoreUnavailable:
            self._end(self._place(_silence(f"rank {self._rank}", limit)), 1)

    def _arm(self, limit: float) -> None:
        """A clock that needs no interpreter, for a main thread that never gives it up: nobody winds it up again then."""
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=2)
        self._armed = time.monotonic()

    def _place(self, why: str) -> str:
        """Where this rank is. One after the other, so that what they print stays apart."""
        time.sleep(min(0.2 * self._rank, HEARD))
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
        since = time.strftime("%H:%M:%S", time.localtime(HEARTBEAT.since))
        return f"stuck ({why}); this one is {HEARTBEAT.place} since {since}, at\n{''.join(stack).rstrip()}"


def _silence(who: str, limit: float) -> str:
    return f"no sign of life from {who} for {limit:.0f} s; run.timeout_minutes={limit / 60:g} is the limit: raise it if this was only slow"


def local_peers(world: World) -> dict[int, int]:
    """The other ranks on this machine by file descriptors that become readable when their processes end. A collective."""
    home = _home()
    places = world.gather_objects((home, os.getpid()))
    found = {}
    for rank, (where, pid) in enumerate(places):
        if rank != world.rank and where == home is not None:
            with contextlib.suppress(
                OSError
            ):  # not allowed in some containers; then launchers and timeouts must do
                found[os.pidfd_open(pid)] = rank
    return found


def _home() -> str | None:
    """The machine, and the container in it, whose process ids these are."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return None


def say(text: str) -> None:
    """In one piece, past the buffers, whose locks another thread may hold."""
    rest = f"{text.rstrip()}\n".encode(errors="backslashreplace")
    while rest:
        rest = rest[os.write(2, rest) :]
