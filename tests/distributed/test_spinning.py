"""Tests the control of spinning OpenMP threads: its measurement, and its effect on the runtime of torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppo_ds.distributed import spinning
from ppo_ds.distributed.spinning import Times, find_libgomp, start_spin_control, thread_times, waiting_share
from ppo_ds.distributed.threads import own_cores
from tests.support.environment import ROOT, environment

GOMP = "/env/torch/lib/libgomp.so.1"
MAPPED = "7f00-7f01 r-xp 00000000 fd:00 12   {}\n"
MILLISECOND = 1_000_000


@pytest.mark.parametrize(
    ("libraries", "found"),
    [
        ([GOMP, GOMP, "/env/torch/lib/libtorch_cpu.so"], GOMP),
        (["/env/torch/lib/libgomp-a34b3233.so.1"], "/env/torch/lib/libgomp-a34b3233.so.1"),
        (["/opt/lib/libiomp5.so", GOMP], None),  # LD_PRELOAD: torch calls Intel's runtime
        (["/opt/lib/libomp.so"], None),
        (["/my env/torch/lib/libgomp.so.1"], "/my env/torch/lib/libgomp.so.1"),
        (["/libgomp/lib/libc.so.6"], None),
        (["/lib/libc.so.6"], None),
    ],
)
def test_the_runtime_that_torch_calls(libraries: list[str], found: str | None) -> None:
    assert find_libgomp("".join(map(MAPPED.format, libraries))) == found


def test_times_of_the_threads_in_the_kernels_format(tmp_path: Path) -> None:
    for name, text in {"7": "300 20 4\n", "8": "5 0 1\n", "9": "broken"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()  # a thread that has ended meanwhile
    assert thread_times(tmp_path) == {"7": Times(300, 20), "8": Times(5, 0)}
    assert thread_times(tmp_path / "none") == {}
    (tmp_path / "file").touch()
    assert thread_times(tmp_path / "file") == {}


@pytest.mark.parametrize(
    ("ran", "waited", "share"),
    [
        ([200, 200], [0, 0], 0.0),
        ([200, 100], [0, 100], 0.5),  # the thread that waits longest delays all others
        ([150, 10], [0, 30], 0.0),  # the second one slept most of the time
        ([10, 0], [10, 0], None),  # so did both
    ],
)
def test_the_thread_that_waits_longest_counts(ran: list[int], waited: list[int], share: float | None) -> None:
    before = {str(i): Times(5 * MILLISECOND, 9 * MILLISECOND) for i in range(2)}
    after = {str(i): Times((5 + ran[i]) * MILLISECOND, (9 + waited[i]) * MILLISECOND) for i in range(2)} | {
        "new": Times(0, 10**9)
    }
    assert waiting_share(before, after, 0.2) == share


class Ended(Exception):
    """Ends the endless loop of the control."""


def test_the_threads_sleep_after_each_busy_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a computation, the last measurement still counts."""
    shares: Iterator[float | None] = iter([None, 0.29, 0.31, None, 0.1, None])
    events: list[str] = []

    def next_share(*_: object) -> float | None:
        try:
            return next(shares)
        except StopIteration:
            raise Ended from None

    @contextmanager
    def idle_threads(library: object, count: int) -> Iterator[None]:
        events.append(f"{count} idle threads")
        yield
        events.append("none")

    monkeypatch.setattr(spinning, "thread_times", lambda tasks: {"7": Times(1, 1)})
    monkeypatch.setattr(spinning, "waiting_share", next_share)
    monkeypatch.setattr(spinning, "idle_threads", idle_threads)
    monkeypatch.setattr("time.sleep", lambda seconds: events.append(str(seconds)))
    with pytest.raises(Ended):
        spinning.control(None, 3)  # type: ignore[arg-type]
    busy, idle = (["3 idle threads", seconds, "none"] for seconds in ("20.0", "1.0"))
    assert events == ["1.0"] * 3 + busy + ["1.0"] + idle + ["1.0"] * 3


@pytest.mark.parametrize("name", spinning.USER_SETTINGS)
def test_the_users_settings_of_the_runtime_stay(name: str) -> None:
    threads = threading.active_count()
    assert start_spin_control(2, 2, {name: "x"}) == f"waits: {name}=x"
    assert start_spin_control(1, 2, {name: "x"}) == ""  # one thread waits for nobody
    assert threading.active_count() == threads


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, ...]]:
    """Files in place of /proc with one thread and the C library as libgomp, and the arguments of controls."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("300 20 4\n")
    (tmp_path / "maps").write_text(MAPPED.format(GOMP))
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(spinning, "TASKS", tmp_path)
    monkeypatch.setattr(spinning, "MAPS", tmp_path / "maps")
    monkeypatch.setattr("ctypes.CDLL", lambda path: path)
    monkeypatch.setattr(spinning, "control", lambda *arguments: calls.append(arguments))
    return calls


def wait_for_control() -> None:
    for thread in threading.enumerate():
        if thread.name == "spin control":
            thread.join()


@pytest.mark.parametrize(
    ("threads", "cores", "idle"),
    [(2, 2, 2), (4, 2, 2), (2, 4, 4), (2, 8, 8), (60, 64, 6), (2, 9, None), (2, 64, None)],
)
def test_the_idle_threads_are_one_more_than_the_free_cores(
    threads: int, cores: int, idle: int | None, started: list[tuple[object, ...]]
) -> None:
    """The team of idle threads includes the one that starts it; far more cores need no control."""
    assert bool(start_spin_control(threads, cores, {})) == (idle is not None)
    wait_for_control()
    assert started == ([(GOMP, idle)] if idle else [])


# With GOMP_SPINCOUNT=INFINITE a waiting thread never sleeps, so that each sleep shows the shorter spinning.
# Two cores suffice: on machines with many, the runtime would need as many idle threads.
SPINS = """
import ctypes, os, sys, threading, time
from ppo_ds.distributed.spinning import MAPS, TASKS, find_libgomp, idle_threads, thread_times
assert not {"torch", "numpy"} & set(sys.modules), "libgomp reads its variables when torch is imported"
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch

runtime = find_libgomp(os.fsdecode(MAPS.read_bytes()))
if runtime is None:
    print("not libgomp", flush=True)
    os._exit(0)
library = ctypes.CDLL(runtime)
torch.set_num_threads(2)
numbers = torch.zeros(100_000)
numbers.add_(1)  # torch sets libgomp up
team = set()
enter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: team.add(threading.get_native_id()))
library.GOMP_parallel(enter, None, ctypes.c_uint(2), ctypes.c_uint(0))
(worker,) = map(str, team - {threading.get_native_id()})

def spins():
    # Returns whether the worker computes for 10 ms after a region of torch, or sleeps. 100 spins take 3 us.
    numbers.add_(1)
    start = thread_times(TASKS)[worker].running
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (TASKS / worker / "stat").read_text().rsplit(") ")[-1][0] == "S":
            return False
        if thread_times(TASKS)[worker].running > start + 10_000_000:
            return True
        time.sleep(0.005)
    raise AssertionError("the worker got no core for 60 s")

assert spins()
with idle_threads(library, 2):
    assert not spins()
end = time.monotonic() + 60
while not spins():  # the idle threads end soon after Python's thread
    assert time.monotonic() < end, "the worker still sleeps"
print("ok", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(len(own_cores().usable) < 2, reason="on one core, two OpenMP threads never spin for long")
@pytest.mark.skipif(not thread_times(spinning.TASKS), reason="the kernel does not count the times of threads")
def test_idle_threads_end_the_spinning_of_torch_for_their_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPINS],
        cwd=ROOT,
        env=environment(GOMP_SPINCOUNT="INFINITE", OMP_NUM_THREADS="2"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.stdout == "not libgomp\n":
        pytest.skip("torch uses another OpenMP runtime")
    assert done.stdout == "ok\n" and done.returncode == 0, done.stderr
