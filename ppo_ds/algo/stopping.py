"""Why a run may end before its last step: a signal or a time limit. All ranks agree before anyone leaves."""

from __future__ import annotations

import signal
import time
from types import FrameType

from ppo_ds.engine.world import World

_NO, _TIME, _SIGNAL = 0, 1, 2
_REASON = {_TIME: "time_limit", _SIGNAL: "signal"}


class StopRequest:
    """SIGTERM, SIGINT and SIGUSR1 only set a flag; the step in progress is finished and saved."""

    def __init__(self, world: World, max_minutes: float | None):
        self.world = world
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def agreed(self) -> str | None:
        """"signal", "time_limit" or None, alike on every rank. A collective."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return _REASON.get(self.world.max_int(_SIGNAL if self._signalled else _TIME if late else _NO))
