"""Watchdog: a thread on each rank that ends the rank when a peer fails or dies, or when the run hangs.

A rank that waits in a collective does not learn the cause by itself: gloo raises an error that would hide the
cause, and NCCL waits until its timeout. The first rank to fail writes the failure into the store that all
ranks share (distributed/store.py), and every watchdog reads it within a second. If a process dies without
writing a failure, the ranks on its machine notice this. The loss of a machine is detected as a hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, ValidationError

from ppo_ds.distributed import heartbeat
from ppo_ds.distributed.exit import exit_now, run_with_timeout
from ppo_ds.distributed.store import ANSWER_TIMEOUT, RankStore, StoreClosed, StoreSilent, StoreUnavailable
from ppo_ds.distributed.world import World
from ppo_ds.errors import single_line

# Times in seconds.
POLL = 0.5  # time between two checks
# time that a rank with an error waits for an earlier failure of another rank, which may be the cause
FIRST_ERROR_WAIT = 2.0
# longest wait until all ranks have read a failure; the failed rank exits only then, since it may hold the
# store
ACK_TIMEOUT = 3.0
CLOSE_TIMEOUT = 3.0  # longest wait for closing the logs of the run
EXIT_TIMEOUT = 2 * ACK_TIMEOUT + CLOSE_TIMEOUT  # longest time between the failure of one rank and all exits
# the process ends this long after the timeout even if no Python thread can run
HARD_EXIT_MARGIN = 5.0

# keys of the store
FAILURE, FAILURE_CLAIMS, FAILURE_ACKS, STALLED = "failure", "failure_claims", "failure_acks", "stalled"


ExitCode = Literal[1, 2, 130]  # exit codes of a failure, never 0


class Failure(BaseModel):
    """Failure of a rank as it is written into the store."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    rank: NonNegativeInt
    reason: Annotated[str, AfterValidator(single_line)]
    code: ExitCode  # exit code of all ranks
    stuck: bool  # True for a hang
    quiet: bool  # the failed rank's output is complete, so the other ranks print nothing


def write_stderr(text: str) -> None:
    """Writes ``text`` to stderr without Python's buffers, whose locks another thread may hold."""
    rest = f"{text.rstrip()}\n".encode(errors="backslashreplace")
    while rest:
        rest = rest[os.write(2, rest) :]


def schedule_hard_exit(seconds: float) -> None:
    """Makes the process print the stacks of its threads and exit after ``seconds``.

    Fires even if the GIL is never released.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


@dataclass(frozen=True)
class Process:
    """Operations on this process that the watchdog uses. Tests replace them by simulated operations."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    exit: Callable[[int], NoReturn] = exit_now
    write: Callable[[str], None] = write_stderr
    schedule_hard_exit: Callable[[float], None] = schedule_hard_exit


class Watchdog:
    """Ends this rank when a peer fails or dies, or when the run hangs. Does nothing until ``start``."""

    def __init__(self, process: Process | None = None) -> None:
        self.started = False
        self._process = process or Process()
        self._limit: float | None = None  # seconds without a beat after which a hang is reported
        # seconds without a beat; of a suspension of the whole process, only a few seconds count
        self._silent = 0.0
        self._beats = -1  # number of beats at the last check
        self._last_check = self._hard_exit_scheduled = -float("inf")
        self._callbacks: list[Callable[[], None]] = []
        self._close_record: Callable[[str], None] = lambda reason: None
        self._stopped = threading.Event()
        # set when the thread starts to end this process because of a failure of another rank
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self, world: World, store: RankStore) -> None:
        """Connects to the other ranks and starts the thread. All ranks must call this."""
        self.connect(world, store)
        self.started = True
        self._thread.start()

    def connect(self, world: World, store: RankStore) -> None:
        """Sets ``store`` and opens a pidfd of each other rank on this machine. All ranks must call this."""
        self._rank, self._size, self._store = world.rank, world.size, store
        self._peers = local_peers(world)
        # not select.select(), which accepts no descriptor above 1023; with many ranks, sockets use up the
        # lower ones
        self._ended = select.poll()
        for descriptor in self._peers:
            self._ended.register(descriptor, select.POLLIN)

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Makes the thread call ``callback``, which must be quick and not a collective, twice a second.

        After a callback that raises StoreSilent, and while the store is silent, no callback is called.
        """
        self._callbacks.append(callback)

    def set_timeout(self, minutes: float, close_record: Callable[[str], None]) -> None:
        """Sets the timeout: from now on, the run ends after ``minutes`` without a heartbeat.

        If the thread ends this rank because another rank failed or the run hangs, it first calls
        ``close_record``, which closes the logs, with the reason.
        """
        self._close_record = close_record
        self._limit = 60 * minutes
        self._postpone_hard_exit(self._limit)

    def stop(self) -> None:
        """Stops watching after a successful run.

        All ranks must call this when finished. A rank that exits before all have called it counts as dead.
        """
        if not self.started:
            return
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        for descriptor in self._peers:
            os.close(descriptor)

    def fail(self, text: str, reason: str, code: ExitCode, *, own: bool = False) -> ExitCode:
        """Reports an error of this rank: prints ``text``, notifies the other ranks and returns ``code``.

        The caller must then exit with that code, as the other ranks do. If another rank has failed before,
        this method exits instead of returning, since that rank's error is the cause. ``reason`` is a short
        phrase that the other ranks print. ``own=True`` means that no other rank can have caused the error and
        that ``text`` is complete. The other ranks then print nothing.
        """
        if self._size > 1:
            # during this sleep, the thread ends the process if another rank has failed first
            self._process.sleep(0.0 if own else FIRST_ERROR_WAIT)
            earlier = self._ending.is_set()
            # if the store is unavailable, the other ranks notice this themselves
            with contextlib.suppress(StoreUnavailable):
                earlier = earlier or self._store.add(FAILURE_CLAIMS) > 1
            if earlier:
                self._process.sleep(EXIT_TIMEOUT)
                if not self._ending.is_set():  # the other rank ended before it published its failure
                    self._process.write(text)
                self._process.exit(code)
        # the other ranks exit once they have read the failure; the thread must not report their exits as
        # failures
        self._stopped.set()
        self._process.write(text if own or self._size == 1 else f"rank {self._rank} failed:\n{text}")
        self._limit = None
        with contextlib.suppress(StoreUnavailable):
            self._publish(reason, code, quiet=own)
            self._store.add(FAILURE_ACKS)
            self._await_acks(self._size)
        return code

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.check()
                self._poll_peers()
        except Exception as error:  # without this thread the rank would be unwatched
            reason = f"{type(error).__name__}: {error}"
            self._process.exit(self.fail(traceback.format_exc(), reason, 1))

    def check(self) -> None:
        """Checks for failures of other ranks and a hang of this rank. The thread calls it twice a second."""
        failure, suspended = None, self._suspended_peer()
        if suspended == 0:  # rank 0 usually holds the store, which would not answer
            return self._check_progress(suspended)
        try:
            failure = self._read_failure()
        except StoreSilent:
            return self._check_progress(suspended)
        except StoreClosed:
            # If the launcher held the store, the ranks are now orphans, which save a checkpoint and end by
            # themselves (run/stopping.py). Otherwise rank 0 held the store and has ended.
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._poll_peers()  # if rank 0 is on this machine, this reports its death
                reason = "its store, which all ranks use, no longer answers"
                self._exit(f"stopped because rank 0 failed ({reason})", 1)
        if failure is not None:
            self._handle_failure(failure)
        with contextlib.suppress(StoreSilent):
            for callback in self._callbacks:
                callback()
        self._check_progress(suspended)

    def _suspended_peer(self) -> int | None:
        """Returns the first rank on this machine whose process is suspended, as by SIGSTOP, or None."""
        for descriptor, rank in self._peers.items():
            pid = Path(f"/proc/self/fdinfo/{descriptor}").read_text().partition("Pid:")[2].split()[0]
            with contextlib.suppress(OSError):  # the process has just ended
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                    return rank
        return None

    def _poll_peers(self) -> None:
        """Waits until the next check; ends this rank if another rank on this machine ends meanwhile."""
        ended = self._ended.poll(1000 * POLL)
        if not ended or self._stopped.is_set():
            return
        self._ending.set()
        rank = self._peers[ended[0][0]]
        reason = "its process died without an error message; possibly killed by the kernel for lack of memory"
        with contextlib.suppress(StoreUnavailable):
            # a failure that the rank published before it ended
            if (failure := self._read_failure()) is not None:
                self._handle_failure(failure)
            self._store.add(FAILURE_CLAIMS)
            self._publish(reason, 1, rank)
            self._store.add(FAILURE_ACKS)
        self._exit(f"stopped because rank {rank} failed ({reason})", 1, acks=self._size - 1)

    def _read_failure(self) -> Failure | None:
        """Returns the failure that is in the store, or None.

        If the failure is invalid, it was written from outside the run, and the run ends with an error.
        """
        text = self._store.get(FAILURE)
        if text is None:
            return None
        try:
            failure = Failure.model_validate_json(text)
        except ValidationError:
            failure = None
        if failure is None or failure.rank >= self._size:
            reason = "the store that all ranks share holds a failure that none of them wrote"
            self._exit(f"stopped because {reason}: {single_line(text)}", 1)
        return failure

    def _handle_failure(self, failure: Failure) -> None:
        """Exits because of a failure in the store, unless it is this rank's own, which ``fail`` is reporting.

        Prints one line, or in a hang this rank's phase and stack; nothing if the failure is ``quiet``.
        """
        if failure.rank == self._rank and not failure.stuck and self._stopped.is_set():
            return  # the failure is this rank's own, and ``fail`` is reporting it
        self._ending.set()  # before the other ranks may exit, which causes errors in this rank's collectives
        with contextlib.suppress(StoreUnavailable):
            self._store.add(FAILURE_ACKS)
        line = f"stopped because rank {failure.rank} failed ({failure.reason})"
        if failure.stuck:
            line = self._describe_hang(failure.reason)
        self._exit(line, failure.code, acks=self._size, quiet=failure.quiet)

    def _publish(
        self, reason: str, code: ExitCode, rank: int | None = None, stuck: bool = False, quiet: bool = False
    ) -> None:
        rank = self._rank if rank is None else rank
        failure = Failure(rank=rank, reason=reason, code=code, stuck=stuck, quiet=quiet)
        self._store.put(FAILURE, failure.model_dump_json())

    def _await_acks(self, acks: int) -> None:
        deadline = self._process.clock() + ACK_TIMEOUT
        while acks and self._store.add(FAILURE_ACKS, 0) < acks and self._process.clock() < deadline:
            self._process.sleep(POLL / 5)

    def _exit(self, line: str, code: int, acks: int = 0, quiet: bool = False) -> NoReturn:
        self._ending.set()
        if not quiet:
            self._process.write(f"rank {self._rank}: {line}")
        run_with_timeout(CLOSE_TIMEOUT, lambda: self._close_record(line.partition("\n")[0]))
        with contextlib.suppress(StoreUnavailable):
            self._await_acks(acks)
        self._process.exit(code)

    def _check_progress(self, suspended: int | None) -> None:
        """Publishes a hang if no beat came within the timeout; each rank then reports the hang and exits."""
        if (limit := self._limit) is None:
            return
        now, beats = self._process.clock(), heartbeat.read().beats
        if now - self._hard_exit_scheduled > HARD_EXIT_MARGIN / 2:
            self._postpone_hard_exit(limit)
        # of a longer gap than one wait for the store causes, the rest is ignored: this process was suspended
        gap = min(now - self._last_check, 2 * POLL + ANSWER_TIMEOUT)
        self._silent = self._silent + gap if self._beats == beats else 0.0
        self._beats, self._last_check = beats, now
        if self._silent <= limit:
            return
        who = f"rank {self._rank}" if suspended is None else f"rank {suspended}, which is suspended,"
        if suspended == 0:
            self._exit(self._describe_hang(_no_progress(who, limit)), 1)
        try:
            self._store.add(f"{STALLED}{self._rank}")
            if self._store.add(FAILURE_CLAIMS) == 1:
                self._process.sleep(2 * POLL)  # ranks that wait for each other stall at the same time
                stalled = [self._store.add(f"{STALLED}{rank}", 0) for rank in range(self._size)]
                who = "any rank" if self._size > 1 and all(stalled) else who
                self._publish(_no_progress(who, limit), 1, stuck=True)
            elif self._silent > limit + EXIT_TIMEOUT:  # a rank ended before it published its failure
                self._exit(self._describe_hang(_no_progress(who, limit)), 1)
        except StoreUnavailable:
            self._exit(self._describe_hang(_no_progress(who, limit)), 1)

    def _postpone_hard_exit(self, limit: float) -> None:
        """Restarts the timer of the hard exit, which fires if the main thread never releases the GIL."""
        self._process.schedule_hard_exit(limit + HARD_EXIT_MARGIN)
        self._hard_exit_scheduled = self._process.clock()

    def _describe_hang(self, reason: str) -> str:
        """Describes a hang by its ``reason``, this rank's phase and the stack of the main thread.

        Each rank first waits for a different time, so that the outputs of the ranks do not interleave.
        """
        self._process.sleep(min(0.2 * self._rank, ACK_TIMEOUT))
        stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
        current = heartbeat.read()
        since = time.strftime("%H:%M:%S", time.localtime(current.since))
        return f"stuck ({reason}); this rank is {current.phase} since {since}, at\n{''.join(stack).rstrip()}"


def _no_progress(who: str, limit: float) -> str:
    return (
        f"no progress on {who} for {limit:.0f} s; run.timeout_minutes={limit / 60:g} is the limit: "
        "raise it if the run was only slow"
    )


def local_peers(world: World) -> dict[int, int]:
    """Maps the pidfds of the other ranks' processes on this machine to the ranks. All ranks must call this.

    A pidfd becomes readable once its process has ended. A machine is identified by the boot id of its kernel
    and its namespace of process ids, so each container counts as a machine.
    """
    machine = None
    with contextlib.suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        machine = boot + os.readlink("/proc/self/ns/pid")
    peers = {}
    for rank, (other, pid) in enumerate(world.gather_objects((machine, os.getpid()))):
        if rank != world.rank and other == machine is not None:
            # some containers forbid pidfd_open; then only launchers and timeouts detect a dead rank
            with contextlib.suppress(OSError):
                peers[os.pidfd_open(pid)] = rank
    return peers
