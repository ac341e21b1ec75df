"""Lock of a run directory: at most one run at a time writes into it.

The holder keeps ``run.lock`` open under ``flock``; the file describes the holder. Some file systems do not
support such locks or do not share them between machines. The holder therefore also renews the file's
modification time. If this kernel cannot see the holder's lock, the holder counts as ended 60 s after the last
renewal. Without such locks, two runs that start at the same moment may both get it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ppo_ds.errors import UserError

NAME = "run.lock"
# Times in seconds.
RENEWAL = 5.0  # time between two renewals
STALE = 60.0  # time without renewal after which a holder elsewhere has ended
ENDING = 60.0  # longest wait of a launch for a holder that is ending
# Wait before a launch is refused. A holder that has just received a stop signal marks itself as ending in
# this time, and the launch then waits for its end.
REACTION = 0.7
POLL = 0.1  # time between two attempts to take the lock
MAX_TIME = 1e11  # of a holder's start, in seconds since 1970; a later one cannot be shown as a date
# attempts of a launch to create a directory that another run removes at its end; where no directory can be
# created, as in /proc, every attempt fails with the same error
MAX_REMOVALS = 1000


def machine_id() -> str:
    """Returns an identifier of the running kernel: two processes on the same kernel get the same one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return platform.node()


@dataclass(frozen=True)
class Holder:
    """Content of a lock file; ``token`` is empty if the file is empty or damaged."""

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    host: str = field(default_factory=platform.node)
    machine: str = field(default_factory=machine_id)
    pid: int = field(default_factory=os.getpid)
    since: float = field(default_factory=time.time)
    launch: str = ""  # the same for all ranks of one launch
    ending: int = 0  # 1 once the holder has begun to end; a digit, so that the file's length never changes

    def __str__(self) -> str:
        if not self.token:
            return "a run whose lock cannot be read"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"a run on {self.host}, process {self.pid}, since {since}"

    def write(self, descriptor: int) -> None:
        os.ftruncate(descriptor, os.pwrite(descriptor, json.dumps(asdict(self)).encode(), 0))
        os.fsync(descriptor)


def read_holder(descriptor: int) -> Holder:
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        kinds = {name: type(value) for name, value in asdict(Holder()).items()}
        holder = Holder(**{name: kind(content[name]) for name, kind in kinds.items()})
        return holder if 0 <= holder.since < MAX_TIME else Holder(token="")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Holder(token="")


class RunLock:
    """The lock of one run directory, held by this process until ``release``."""

    def __init__(self, path: Path, descriptor: int, created: list[Path], launch: str):
        """Writes this process, the holder, into an open lock file.

        ``release`` deletes those of the folders ``created`` that are empty."""
        self.path = path
        self._descriptor, self._created = descriptor, created
        self._holder = Holder(launch=launch)
        self._holder.write(descriptor)
        self._released = threading.Event()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Closes the file in a forked process, which would otherwise keep the lock after the holder's end."""
        if not self._released.is_set():
            self._released.set()
            os.close(self._descriptor)

    def start_renewal(self, on_loss: Callable[[str], None]) -> None:
        """Starts the thread that renews the lock.

        If another run takes the lock, as after a suspension, the thread calls ``on_loss`` with one line.
        """
        threading.Thread(target=self._renew, args=(on_loss,), name="run lock", daemon=True).start()

    def _renew(self, on_loss: Callable[[str], None]) -> None:
        while not self._released.wait(RENEWAL):
            with suppress(OSError):  # the next renewal may succeed
                if not self._owns_file():
                    on_loss(
                        f"run.dir={self.path.parent}: another run has taken the lock of this run, which was "
                        f"not renewed for {STALE:.0f} s; start this run again in another run.dir, or when "
                        "the other one has ended"
                    )
                    return
                os.utime(self._descriptor)

    def _owns_file(self) -> bool:
        return (
            _is_at(self.path, self._descriptor) and read_holder(self._descriptor).token == self._holder.token
        )

    def mark_ending(self) -> None:
        """Marks the holder as ending, so that the next launch waits for it instead of raising UserError."""
        if not self._holder.ending and not self._released.is_set():
            self._holder = replace(self._holder, ending=1)
            with suppress(OSError):
                self._holder.write(self._descriptor)

    def release(self) -> None:
        """Deletes the file and empty created directories; does nothing the second time and in a fork."""
        if self._released.is_set():
            return
        self._released.set()
        with suppress(OSError):
            if self._owns_file():
                self.path.unlink()
            os.close(self._descriptor)
            for folder in self._created:
                folder.rmdir()


def acquire(run_dir: Path, launch: str = "", notice: Callable[[str], None] = print) -> RunLock:
    """Acquires the lock of ``run_dir``; creates the directory if it is missing.

    Raises UserError if another run holds it. Waits up to ``ENDING`` seconds for a holder that is ending, and
    up to ``STALE`` seconds for a renewal by a holder on another machine. ``notice`` is called with a line
    about the wait. ``launch`` is the same for all ranks of one launch.
    """
    path, created = run_dir / NAME, [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    # of the current holder: its token, and its renewal time and the time when it was first seen
    first, first_renewed, seen, noticed = "", 0.0, 0.0, False
    removals = 0
    while True:
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(path, os.O_CREAT) as descriptor:
                locked = _try_lock(descriptor)
                if locked and not _is_at(path, descriptor):  # its holder has just released it
                    continue
                holder, renewed = read_holder(descriptor), os.fstat(descriptor).st_mtime
                if holder.token != first:
                    first, first_renewed, seen = holder.token, renewed, time.monotonic()
                waited = time.monotonic() - seen
                silent = locked is not False and renewed == first_renewed
                ended = locked and (not holder.token or holder.machine == machine_id())
                if ended or (silent and (not holder.token or waited > STALE)):
                    return RunLock(path, os.dup(descriptor), created, launch)
        except OSError as error:
            removals += 1
            if isinstance(error, FileNotFoundError) and removals < MAX_REMOVALS:
                continue
            raise UserError(
                f"run.dir={run_dir}: cannot be written: {error.strerror} ({error.filename or path}); "
                "choose another run.dir"
            ) from error
        patience = ENDING if holder.ending else STALE if silent else REACTION
        if waited > patience:
            raise UserError(_refusal(run_dir, holder))
        if waited > REACTION and not noticed:
            noticed = True
            notice(f"run.dir={run_dir}: waiting up to {patience:.0f} s for the end of {holder}")
        time.sleep(POLL)


def check_free(run_dir: Path, launch: str) -> None:
    """Raises UserError if a run of another ``launch`` holds the lock. Ranks without the lock call this."""
    deadline = time.monotonic() + REACTION  # rank 0 of this launch may be about to write its name
    while True:
        try:
            with _opened(run_dir / NAME) as descriptor:
                holder, busy = read_holder(descriptor), _try_lock(descriptor) is False
        except OSError:
            return
        if not busy or holder.ending or holder.launch == launch:
            return
        if time.monotonic() > deadline:
            raise UserError(_refusal(run_dir, holder))
        time.sleep(POLL)


@contextmanager
def _opened(path: Path, create: int = 0) -> Iterator[int]:
    """Opens the lock file; raises OSError if it is not a regular file."""
    flags = os.O_RDWR | create | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        # a file with another name could be any file of the user
        if not stat.S_ISREG((status := os.fstat(descriptor)).st_mode) or status.st_nlink > 1:
            raise OSError(errno.EINVAL, "is not a regular file with one name", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Tries to lock the file and returns whether it could; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether the file opened as ``descriptor`` is still the file at ``path``."""
    return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))


def _refusal(run_dir: Path, holder: Holder) -> str:
    remedy = "wait until it ends or stop it, or choose another run.dir or run.name"
    late = f", which has not ended within {ENDING:.0f} s" if holder.ending else ""
    return f"run.dir={run_dir}: is {'still ' if late else ''}in use by {holder}{late}; {remedy}"
