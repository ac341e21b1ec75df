"""Why a run may end before its last step: a signal or a time limit. All ranks hear of it at once, and agree before anyone leaves."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from types import FrameType

from ppo_ds.distributed.launcher import launcher_pids
from ppo_ds.distributed.store import RankStore, StoreUnavailable
from ppo_ds.distributed.world import World

log = logging.getLogger(__name__)

_NO, _TIME, _SIGNAL = 0, 1, 2
_REASON = {_TIME: "time_limit", _SIGNAL: "signal"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PASSED_ON = 2.0  # seconds within which a launcher passes on what the terminal has already sent to all
NOTICE = "stop"


class Abandoned(Exception):
    """The step in progress is left by all ranks at the same place. It is to be as if it had not begun."""


class StopRequest:
    """SIGTERM, SIGINT and SIGUSR1 to any rank ask all of them to stop; so does a launcher that has ended. A second Ctrl-C, later, ends it at once.

    ``should_stop`` is known on every rank within about a second, also while others wait in a collective, but not at the same moment: what hangs on it
    alone must not be a collective. ``raise_if_stopped`` and ``agreed_reason`` are, and say the same everywhere.
    """

    def __init__(self, world: World, max_minutes: float | None, store: RankStore):
        self.world = world
        self.store = store
        self.max_minutes = max_minutes
        self.deadline: float | None = None
        self._why: str | None = None
        self._interrupted: float | None = None  # when Ctrl-C came first
        self._told = False  # the others know
        self._launchers = launcher_pids()
        self._caught: int | None = None  # where numbers of signals can be read

    def install_handlers(self) -> None:
        """Until now a signal has ended this process: there was nothing to save."""
        self.deadline = None if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        self._caught, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # python calls a handler once the main thread is back from a collective, minutes later maybe; this pipe has the signal's number at once
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def should_stop(self) -> bool:
        """Whether a signal has come to any rank, as far as this one knows. Costs nothing; once true it stays so."""
        return self._why is not None

    def agreed_reason(self) -> str | None:
        """ "signal", "time_limit" or None, alike on every rank. A collective."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return _REASON.get(self.world.max_int(_SIGNAL if self.should_stop() else _TIME if late else _NO))

    def raise_if_stopped(self) -> None:
        """Raises Abandoned on all ranks where any is asked to stop. A collective."""
        if self.world.max_int(int(self.should_stop())):
            raise Abandoned

    def poll(self) -> None:
        """From a thread, about twice a second: what has come here is told to the others, and what they tell is noted."""
        if self._caught is None:
            return
        if self._why is None and (news := self._news()) is not None:
            self._why = news  # nothing else is ever put there: the handler may have been faster
        if self._why is not None and not self._told:
            self._told = True
            self._tell(self._why)

    def _news(self) -> str | None:
        with suppress(BlockingIOError):  # nothing has come
            for number in os.read(self._caught, 64):
                if number in SIGNALS:
                    return self._said(number)
        if launcher_pids() != self._launchers:
            return (
                f"the launcher of rank {self.world.rank} has ended"  # nobody is left who could send a signal
            )
        with suppress(
            StoreUnavailable
        ):  # who held the store has ended: its launcher with it, or it fails the next collective
            return self.store.get(NOTICE)
        return None

    def _tell(self, why: str) -> None:
        with suppress(StoreUnavailable):  # as above
            self.store.put(NOTICE, why)
        if self.world.is_main:
            log.warning(
                "stopping: %s; a step whose update has not begun is abandoned, and repeated by the next start",
                why,
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, and no more than noted: the thread that looks tells of it."""
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted is not None and now - self._interrupted > PASSED_ON:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        self._why = self._why or self._said(number)

    def _said(self, number: int) -> str:
        return f"{signal.Signals(number).name} to rank {self.world.rank}"
