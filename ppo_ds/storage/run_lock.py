"""Lock of a run directory: at most one run at a time writes into it.

The file ``run.lock`` in the directory names the process that holds the lock. A new file is created
exclusively, so if several processes start at once, exactly one of them gets the lock. The holder renews the
file's modification time every few seconds and deletes the file when it ends. A holder that was killed leaves
the file. The next start deletes the file as soon as the lock is stale:

- Holder on the same machine: the lock is stale once the holder's process has ended. A later process with the
  same id is recognized by its start time. A container with its own process ids counts as a machine.
- Holder on another machine: the lock is stale after 60 s without renewal, by the clock of the file system.

Stale files are deleted under ``flock``, so that a start cannot delete the new file of another start. On a
network file system this needs a working ``flock`` (NFS 4, or NFS 3 with its lock service). Exclusive creation
works with all versions of NFS. Without ``flock``, two starts that find the same stale lock at the same moment
may both get the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from ppo_ds.errors import UserError
from ppo_ds.storage.drafts import draft_path

NAME = "run.lock"
# Times in seconds.
RENEWAL = 5.0  # time between two renewals
STALE = 60.0  # time without renewal after which the lock of a holder on another machine is stale
ENDING = 60.0  # longest wait of a start for a holder that is ending
# Wait before a start is refused. A holder that has just received a stop signal marks itself as ending in this
# time, and the start then waits for its end.
REACTION = 0.7
POLL = 0.1  # time between two attempts to take the lock


@dataclass(frozen=True)
class Holder:
    """Content of a lock file. If it cannot be read, all fields except ``renewed`` have their defaults."""

    renewed: float  # modification time of the file
    token: str = ""  # random identifier of the lock
    host: str = "unknown"
    machine: str = ""  # ``machine_id()`` of the holder
    pid: int = 0
    started: int = 0  # clock ticks from the boot to the start of the process; 0: unknown
    since: float = 0.0  # time.time() when the lock was taken
    launch: str = ""  # identifier that is the same for all ranks of one launch
    ending: bool = False  # True once the holder has begun to end

    @property
    def is_local(self) -> bool:
        return self.machine == machine_id()

    def __str__(self) -> str:
        if not self.token:
            return "a run whose lock cannot be read"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"a run on {self.host}, process {self.pid}, since {since}"


class RunLock:
    """The lock of one run directory, held by this process from ``acquire`` to ``release``."""

    def __init__(self, path: Path, launch: str, created: list[Path]):
        """Takes the lock. ``created`` are the directories that ``release`` removes if they are empty.

        Raises FileExistsError if the file exists.
        """
        self.path = path
        self._created = created
        self._owner = os.getpid()
        self._content: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": platform.node(),
            "machine": machine_id(),
            "pid": self._owner,
            "started": process_start(self._owner)[1],
            "since": time.time(),
            "launch": launch,
            "ending": 0,  # a digit, so that the length of the file never changes
        }
        self._released = threading.Event()
        self._descriptor = self._create()

    def _create(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o666)
        try:
            os.write(descriptor, json.dumps(self._content).encode())
            os.fsync(descriptor)
        except OSError:
            self.path.unlink()
            os.close(descriptor)
            raise
        return descriptor

    def start_renewal(self, on_loss: Callable[[str], None]) -> None:
        """Starts the thread that renews the lock.

        If another run has taken the lock, the thread calls ``on_loss`` with one line. This happens only if,
        for longer than ``STALE``, this process was suspended or its file system did not answer.
        """
        threading.Thread(target=self._renew, args=(on_loss,), name="run lock", daemon=True).start()

    def _renew(self, on_loss: Callable[[str], None]) -> None:
        while not self._released.wait(RENEWAL):
            with suppress(OSError):  # the next renewal may succeed
                holder = read_holder(self.path)
                if holder is None:  # somebody has deleted the file
                    with suppress(FileExistsError):
                        self._descriptor = self._create()
                elif holder.token != self._content["token"]:
                    on_loss(
                        f"run.dir={self.path.parent}: the lock of this run was not renewed for {STALE:.0f} s "
                        f"and has been taken by {holder}; start this run again in another run.dir, or when "
                        "the other one has ended"
                    )
                    return
                else:
                    os.utime(self._descriptor)

    def mark_ending(self) -> None:
        """Marks the holder as ending, so that the next start waits for it instead of being refused."""
        if self._content["ending"] or self._released.is_set():
            return
        self._content["ending"] = 1
        with suppress(OSError):
            os.pwrite(self._descriptor, json.dumps(self._content).encode(), 0)

    def release(self) -> None:
        """Deletes the file, and the directories that were created for it if they are empty.

        A second call and a call in a forked process have no effect.
        """
        if self._released.is_set() or os.getpid() != self._owner:
            return
        self._released.set()
        with suppress(OSError):
            _delete(self.path, lambda found: found.token == self._content["token"])
            os.close(self._descriptor)
            for folder in self._created:
                folder.rmdir()


def acquire(run_dir: Path, launch: str = "", notice: Callable[[str], None] = print) -> RunLock:
    """Takes the lock of ``run_dir``; creates the directory if it is missing.

    Raises UserError if another run holds the lock. Waits up to ``ENDING`` seconds for a holder that is
    ending, and up to ``STALE`` seconds for a renewal by a holder on another machine. ``notice`` is called
    with one line about such a wait.
    """
    path, created = run_dir / NAME, [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    first: Holder | None = None
    seen = age = 0.0  # time when the holder was first seen, and seconds from its last renewal to then
    noticed = False
    while True:
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _take(path, launch, created)
            if lock is not None:
                return lock
            holder = read_holder(path)
            if holder is None:  # the lock was released, and its directory perhaps removed
                continue
            if first is None or holder.token != first.token:
                first, seen, noticed = holder, time.monotonic(), False
                age = 0.0 if holder.is_local else _now(path) - holder.renewed
            waited, silent = time.monotonic() - seen, holder.renewed == first.renewed
            if _is_stale(holder, age + waited if silent else 0.0):
                _delete(path, partial(eq, holder))
                continue
        except OSError as error:
            raise UserError(
                f"run.dir={run_dir}: cannot be written: {error.strerror} ({error.filename or path}); "
                "choose another run.dir"
            ) from error
        patience = ENDING if holder.ending else STALE if silent and not holder.is_local else REACTION
        if waited > patience:
            raise UserError(_refusal(run_dir, holder))
        if waited > REACTION and not noticed:
            noticed = True
            notice(f"run.dir={run_dir}: waiting up to {patience - age:.0f} s for the end of {holder}")
        time.sleep(POLL)


def _take(path: Path, launch: str, created: list[Path]) -> RunLock | None:
    """Takes the lock. Returns None if the file exists or its directory has just been removed."""
    try:
        return RunLock(path, launch, created)
    except (FileExistsError, FileNotFoundError):
        return None


def check_free(run_dir: Path, launch: str) -> None:
    """Raises UserError if a run of another ``launch`` on this machine holds the lock and is not ending.

    Ranks that do not take the lock themselves call it.
    """
    with suppress(OSError):
        holder = read_holder(run_dir / NAME)
        if holder and holder.is_local and not holder.ending and holder.launch != launch:
            if not _is_stale(holder, 0.0):
                raise UserError(_refusal(run_dir, holder))


def read_holder(path: Path) -> Holder | None:
    """Returns the holder that a lock file names, or None if the file does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _holder(descriptor)
    finally:
        os.close(descriptor)


def machine_id() -> str:
    """Returns an identifier that is equal for two processes if they see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def process_start(pid: int) -> tuple[str, int]:
    """Returns a process's state and its start time in clock ticks since the boot; ("?", 0) if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?", 0
    return fields[0], int(fields[19])


def _holder(descriptor: int) -> Holder:
    renewed = os.fstat(descriptor).st_mtime
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        content = {
            name: type(default)(content[name])
            for name, default in vars(Holder(0.0)).items()
            if name in content
        }
        return Holder(**content | {"renewed": renewed})
    except (ValueError, TypeError, OverflowError, RecursionError):  # the file is incomplete or damaged
        return Holder(renewed)


def _is_stale(holder: Holder, silent: float) -> bool:
    """Returns whether the holder has ended.

    ``silent`` is the number of seconds without renewal. A holder on another machine is considered to have
    ended if ``silent`` exceeds STALE.
    """
    if not holder.is_local:
        return silent > STALE
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # the process exists and belongs to another user
        pass
    state, started = process_start(holder.pid)
    return state in ("Z", "X") or (started != 0 and started != holder.started)


def _now(path: Path) -> float:
    """Returns the time by the clock of the file system, which may differ from this machine's clock."""
    probe = draft_path(path)
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        probe.unlink()


def _delete(path: Path, condition: Callable[[Holder], bool]) -> None:
    """Deletes a lock file if ``condition`` holds for its content. Only one process at a time does this."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | flags)  # NFS locks only files that are open for writing
        except PermissionError:  # left by a run of another user
            descriptor = os.open(path, os.O_RDONLY | flags)
    except FileNotFoundError:
        return
    try:
        with suppress(OSError):  # raised by a network file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            same = os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
            if same and condition(_holder(descriptor)):
                path.unlink()
    finally:
        os.close(descriptor)


def _refusal(run_dir: Path, holder: Holder) -> str:
    remedy = "wait until it ends or stop it, or choose another run.dir or run.name"
    late = f", which has not ended within {ENDING:.0f} s" if holder.ending else ""
    return f"run.dir={run_dir}: is {'still ' if late else ''}in use by {holder}{late}; {remedy}"
