"""Stops the OpenMP threads of this process from spinning while other processes compete for its cores.

A thread that waits for the others of its team, at the start or at the end of a parallel region, first spins
and then sleeps. GNU's runtime (libgomp, in the wheels of torch for Linux) spins 300,000 times, which took 8
ms on an AMD EPYC. On a quiet machine, spinning saves the time of a wake-up. If the awaited thread needs the
same core, spinning delays it by up to 8 ms in each of thousands of regions per step.

The runtime cannot see other processes. It spins only 100 times while its process has more OpenMP threads than
there are cores (GOMP_SPINCOUNT in the manual of libgomp). This module therefore measures how long the threads
wait for a core, and adds idle OpenMP threads while that time is too long. libgomp's environment variables
would fix the number of spins for the whole run: a small one costs time on a quiet machine, a large one on a
busy machine. Figures: docs/dev/performance.md, "Threads on a busy machine".
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
MAPS = Path("/proc/self/maps")
USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# libgomp, and the runtimes of Intel and LLVM that LD_PRELOAD can load instead. Paths may have spaces.
RUNTIMES = re.compile(r"/(?:.*/)?(libgomp|libiomp5|libomp)\b[^/\s]*\.so\S*")
# Time of one measurement, during which the threads spin. If it were shorter, a single moment of waiting would
# count as a busy machine.
WINDOW_SECONDS = 1.0
SLEEP_SECONDS = 20.0  # time between a measurement on a busy machine and the next one
IDLE_SECONDS = 1.0  # this time if the process computed nothing during the measurement
# Above this fraction of time in which a thread waits for a core, the machine counts as busy. A program of
# equal priority on the same core makes the fraction 0.5. With programs of low priority (nice) it stays small,
# and spinning is then faster.
BUSY = 0.3
# If more would be needed, no control is started: libgomp ends the process if it cannot create a thread, and
# each rank creates this number of threads. With far more cores than threads, the threads of a rank rarely
# share a core. libgomp counts cores without regard to CPU quotas: with a quota of 2 on 64 cores, 64 would be
# needed.
MAX_IDLE_THREADS = 8

log = logging.getLogger(__name__)


class Times(NamedTuple):
    """Times of a thread, in nanoseconds."""

    running: int
    waiting: int  # for a core, while another thread used it


def start_spin_control(threads: int, cores: int, environment: Mapping[str, str]) -> str:
    """Starts a thread that controls the spinning of this process's OpenMP threads.

    Args:
        threads: Number of OpenMP threads of this process.
        cores: Number of cores on which this process may run; libgomp compares it with the threads.
        environment: Variables of this process. If one of USER_SETTINGS is set, no control is started.

    Returns:
        How waiting threads behave, for the banner: the user's settings, or that the control was started.
        Empty with one thread, far more cores than threads, another OpenMP runtime than libgomp, or a kernel
        without waiting times; then no control was started.
    """
    if threads == 1:
        return ""
    if given := [f"{name}={environment[name]}" for name in USER_SETTINGS if name in environment]:
        return f"waits: {', '.join(given)}"
    idle = cores - threads + 2  # with these, the process has one OpenMP thread more than cores
    if idle > MAX_IDLE_THREADS or not thread_times(TASKS):
        return ""
    try:
        runtime = find_libgomp(os.fsdecode(MAPS.read_bytes()))
        if runtime is None:
            return ""
        library = ctypes.CDLL(runtime)
    except OSError:  # /proc cannot be read, or the library's file has been deleted since it was loaded
        return ""
    threading.Thread(target=control, args=(library, max(2, idle)), name="spin control", daemon=True).start()
    return "waits: spinning, asleep on a busy machine"


def find_libgomp(maps: str) -> str | None:
    """Returns the path of libgomp in ``maps`` (see MAPS), or None if it is not the only OpenMP runtime."""
    found = {match[1]: match[0] for match in RUNTIMES.finditer(maps)}
    return found.get("libgomp") if len(found) == 1 else None


def control(library: ctypes.CDLL, idle: int) -> None:
    """Repeatedly measures the waiting times, and lets the threads sleep while the machine is busy.

    The threads spin during each measurement, since sleeping threads would wait for a core even on a machine
    where spinning is faster. While the process computes nothing, the last result stays in effect. If the
    times can no longer be read, warns and returns; the threads then spin as the runtime decides.
    """
    busy = False
    while True:
        before = thread_times(TASKS)
        time.sleep(WINDOW_SECONDS)
        after = thread_times(TASKS)
        if not before or not after:
            log.warning("%s/*/schedstat: not readable any more; OpenMP threads now always spin", TASKS)
            return
        share = waiting_share(before, after, WINDOW_SECONDS)
        busy = busy if share is None else share > BUSY
        if busy:
            with idle_threads(library, idle):
                time.sleep(SLEEP_SECONDS if share is not None else IDLE_SECONDS)


@contextmanager
def idle_threads(library: ctypes.CDLL, count: int) -> Iterator[None]:
    """Keeps a team of ``count`` idle OpenMP threads inside the block, so that libgomp shortens all spinning.

    The threads of a team end with the thread that has started the team.
    """
    started, done = threading.Event(), threading.Event()
    no_effect = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)

    def keep() -> None:
        library.GOMP_parallel(no_effect, None, ctypes.c_uint(count), ctypes.c_uint(0))
        started.set()
        done.wait()

    keeper = threading.Thread(target=keep, name="idle OpenMP threads", daemon=True)
    keeper.start()
    started.wait()
    try:
        yield
    finally:
        done.set()
        keeper.join()


def thread_times(tasks: Path) -> dict[str, Times]:
    """Returns the times of each thread by its id; {} if ``tasks`` or schedstat files cannot be read."""
    found = {}
    try:
        threads = os.listdir(tasks)
    except OSError:  # no /proc, or too many open files
        return {}
    for thread in threads:
        try:
            running, waiting, _ = map(int, (tasks / thread / "schedstat").read_text().split())
        except (OSError, ValueError):  # the thread has ended
            continue
        found[thread] = Times(running, waiting)
    return found


def waiting_share(before: Mapping[str, Times], after: Mapping[str, Times], seconds: float) -> float | None:
    """Returns the largest share waiting / (running + waiting) of a thread, from ``before`` to ``after``.

    Threads that slept for three quarters of ``seconds`` do not count; if all did, returns None. Threads of
    other libraries count too, because the kernel does not tell them apart. If such a thread waits for a core,
    more threads are ready to run than there are cores, and spinning delays them too.
    """
    shares = []
    for thread in before.keys() & after.keys():
        running, waiting = (new - old for new, old in zip(after[thread], before[thread], strict=True))
        if running + waiting > seconds * 1e9 / 4:
            shares.append(waiting / (running + waiting))
    return max(shares, default=None)
