"""Runs commands, each in a separate process group, and ends all their processes at a stop signal.

A signal to the ``deepspeed`` command ends that command at once, while its ranks continue until they have
saved. A caller that waited for the command alone would end, or start the next command, before the ranks end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A second Ctrl-C after this time ends the command at once. Terminals and schedulers often repeat a signal.
REPEAT_SECONDS = 2.0
# options of the Linux system call prctl
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)  # loaded in the parent, because loading could block between fork and exec


class ChildGroups:
    """Runs one command after the other. A stop signal ends the running command and forbids further ones.

    The object handles the stop signals of this process. It must be created in the main thread. On
    Linux, orphaned processes of a command become children of this process, so that ``run`` waits for them
    too. If this process is killed, the kernel sends SIGTERM to the command.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None):
        """Installs the signal handlers; ``on_stop`` is called by the first stop signal."""
        self.stop_signal: signal.Signals | None = None  # the first one
        self.interrupted = False  # whether a second Ctrl-C has killed the command
        self._on_stop = on_stop
        self._group: int | None = None  # process id of the running command, and id of its group
        self._stopped_at = 0.0
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # SIG_IGN: nohup
                signal.signal(number, self.handle)

    def run(self, command: Sequence[str]) -> int:
        """Runs a command and returns its exit code once all processes of its group have ended.

        If signal N ended the command, the exit code is 128 + N. After a stop signal, no command is started.
        """
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        end_with_parent = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)  # called in the child
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent
        )
        self._group = process.pid
        if self.stop_signal is not None:  # the signal arrived before the group was known to the handler
            self._send(signal.SIGTERM)
        while True:
            try:
                pid, status = os.waitpid(-process.pid, 0)
            except ChildProcessError:  # the group has no processes any more
                break
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
        self._group = None
        with suppress(ChildProcessError):  # orphans from other groups that have ended
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        code = process.returncode
        return 128 - code if code < 0 else code

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stop_signal is None:
            self.stop_signal, self._stopped_at = signal.Signals(number), now
            self._on_stop()
            # never SIGINT, at which the deepspeed command prints a traceback
            self._send(signal.SIGTERM)
        elif number == signal.SIGINT and now - self._stopped_at > REPEAT_SECONDS:
            self.interrupted = True
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, number)


def prctl(option: int, value: int) -> None:
    """Sets an option of this process in the kernel, on Linux only."""
    if sys.platform == "linux":
        _LIBC.prctl(option, value, 0, 0, 0)
