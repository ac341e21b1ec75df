"""Stop requests by signals and the time limit; all ranks agree on a request before any rank stops."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Literal

from ppo_ds.distributed.launcher import launcher_pids
from ppo_ds.distributed.store import RankStore, StoreClosed
from ppo_ds.distributed.world import World
from ppo_ds.errors import single_line
from ppo_ds.run.state import ExitReason

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
Reason = Literal["time_limit", "signal"]
REASONS: tuple[Reason | None, ...] = (None, "time_limit", "signal")  # in increasing order of precedence
# A launcher forwards a Ctrl-C that the terminal has already sent to every process. A second SIGINT within
# this time counts as the forwarded one.
FORWARDING_SECONDS = 2.0
STORE_KEY = "stop"


class Abandoned(Exception):
    """Raised on all ranks at the same point to abandon the current step, which then counts as not begun."""


class StepRefused(Abandoned):
    """Raised on all ranks at the same point to abandon the current step and to end the run."""

    def __init__(self, reason: ExitReason, message: str):
        super().__init__(message)
        self.reason = reason


class StopRequest:
    """Stops all ranks when one of them receives SIGTERM, SIGINT or SIGUSR1, or when a launcher exits.

    A second Ctrl-C, more than FORWARDING_SECONDS after the first, ends the process at once. Every rank learns
    of a request within about a second, even in a collective, but not at the same moment. Decisions about
    collectives need ``raise_if_stopped`` or ``agreed_reason``, whose results are equal on all ranks.
    """

    def __init__(self, world: World, max_minutes: float | None, store: RankStore):
        self.world = world
        self.store = store
        self.max_minutes = max_minutes
        self.deadline: float | None = None
        self.reserved = 0.0  # seconds before the deadline that are left for the last evaluation
        self._request: str | None = None  # the signal and its rank, or the launcher that has ended
        self._first_interrupt: float | None = None  # time of the first Ctrl-C
        self._published = False
        self._launchers = launcher_pids()
        self._wakeup_fd: int | None = None  # the read end of a pipe of signal numbers

    def install_handlers(self) -> None:
        """Starts to handle signals and the time limit. Before, a signal ends the process."""
        self.deadline = None if self.max_minutes is None else time.monotonic() + 60 * self.max_minutes
        self._wakeup_fd, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python calls a handler only when the main thread returns from a collective, perhaps minutes later.
        # The signal's number is written to the pipe immediately.
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self.handle)

    def request(self, reason: str) -> None:
        """Requests a stop of all ranks, as a signal does."""
        self._request = reason

    def should_stop(self) -> bool:
        """Returns whether this rank knows of a stop request; once True, stays True. Not a collective."""
        return self._request is not None

    def agreed_reason(self) -> Reason | None:
        """Returns the ranks' stop reason of highest precedence, or None. All ranks must call this."""
        late = self.deadline is not None and time.monotonic() > self.deadline - self.reserved
        mine = "signal" if self.should_stop() else "time_limit" if late else None
        return REASONS[self.world.max_int(REASONS.index(mine))]

    def raise_if_stopped(self) -> None:
        """Raises Abandoned on all ranks if any rank knows of a request. All ranks must call this."""
        if self.world.max_int(int(self.should_stop())):
            raise Abandoned

    def poll(self) -> None:
        """Publishes this rank's request and reads those of other ranks. A thread calls it twice a second.

        Raises StoreSilent if the store does not answer now; the next call tries again.
        """
        if (signals := self._wakeup_fd) is None:
            return
        if self._request is None and (request := self.read_request(signals)) is not None:
            self._request = request  # not assigned if None, since the handler may set it at the same time
        if self._request is None or self._published:
            return
        with suppress(StoreClosed):  # see read_request
            self.store.put(STORE_KEY, self._request)
        self._published = True
        if self.world.is_main:
            log.warning(
                "stopping: %s; a step whose update has not begun is abandoned, "
                "and repeated by the next start",
                self._request,
            )

    def read_request(self, signals: int) -> str | None:
        """Describes a signal in the pipe, an ended launcher or another rank's request; None without any."""
        with suppress(BlockingIOError):  # the pipe is empty
            for number in os.read(signals, 64):
                if number in SIGNALS:
                    return self.describe(number)
        if launcher_pids() != self._launchers:  # a launcher that has ended cannot forward signals
            return f"the launcher of rank {self.world.rank} has ended"
        # The store is closed once the process that holds it has ended. In that case the launcher ends too, or
        # the next collective fails.
        with suppress(StoreClosed):
            request = self.store.get(STORE_KEY)
            return None if request is None else single_line(request)
        return None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Records a signal in the main thread; the polling thread publishes it."""
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._first_interrupt is not None and now - self._first_interrupt > FORWARDING_SECONDS:
                raise KeyboardInterrupt
            self._first_interrupt = self._first_interrupt or now
        self._request = self._request or self.describe(number)

    def describe(self, number: int) -> str:
        return f"{signal.Signals(number).name} to rank {self.world.rank}"
