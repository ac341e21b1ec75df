"""Why a run may end before its last step: a signal or a time limit. All ranks agree before anyone leaves."""

from __future__ import annotations

import signal
import time
from types import FrameType

from ppo_ds.engine.orphans import launchers
from ppo_ds.engine.world import World

_NO, _TIME, _SIGNAL = 0, 1, 2
_REASON = {_TIME: "time_limit", _SIGNAL: "signal"}
PASSED_ON = 2.0  # seconds within which a launcher passes on what the terminal has already sent to all


class StopRequest:
    """SIGTERM, SIGINT and SIGUSR1 only set a flag; the step in progress is finished and saved. A second Ctrl-C, later, ends it at once.

    A launcher that has ended counts as a signal.
    """

    def __init__(self, world: World, max_minutes: float | None):
        self.world = world
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._signalled: float | None = None  # when
        self._launchers = launchers()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self._signalled is not None and now - self._signalled > PASSED_ON:
            raise KeyboardInterrupt
        self._signalled = now

    def agreed(self) -> str | None:
        """ "signal", "time_limit" or None, alike on every rank. A collective."""
        if self._signalled is None and launchers() != self._launchers:
            self._signalled = time.monotonic()  # an orphan: nobody is left who could send a signal
        late = self.deadline is not None and time.monotonic() > self.deadline
        return _REASON.get(self.world.max_int(_SIGNAL if self._signalled is not None else _TIME if late else _NO))
