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
    assert start_spin_control(2, 1000, {}) == ""  # would need a thousand idle threads
    assert threading.active_count() == threads


# With GOMP_SPINCOUNT=INFINITE a waiting thread never sleeps, so that each sleep shows the shorter spinning.
SPINS = """
import os, sys, time
from ppo_ds.distributed.spinning import MAPS, find_libgomp, idle_threads
assert not {"torch", "numpy"} & set(sys.modules), "libgomp reads its variables when torch is imported"
import ctypes, torch

torch.set_num_threads(2)
main = set(os.listdir("/proc/self/task"))
numbers = torch.zeros(1_000_000)
(worker,) = set(os.listdir("/proc/self/task")) - main
library = ctypes.CDLL(find_libgomp(MAPS.read_text()))
idle = max(2, len(os.sched_getaffinity(0)))

def sleeps():
    status = open(f"/proc/self/task/{worker}/status").read()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

def regions():
    for _ in range(20):
        numbers.add_(1)
        time.sleep(0.001)

spinning = sleeps()
regions()
assert sleeps() == spinning
with idle_threads(library, idle):
    numbers.add_(1)
    end = time.monotonic() + 300
    while sleeps() == spinning:  # the worker sleeps as soon as it has spun 100 times
        assert time.monotonic() < end, "the worker still spins"
        time.sleep(0.01)
end = time.monotonic() + 300
spinning = None
while sleeps() != spinning:  # the idle threads end soon after Python's thread
    assert time.monotonic() < end, "the worker still sleeps"
    numbers.add_(1)  # wakes it
    spinning = sleeps()
    regions()
print("ok")
os._exit(0)
"""


@pytest.mark.skipif(len(own_cores().usable) < 2, reason="on one core, two OpenMP threads never spin for long")
def test_idle_threads_end_the_spinning_of_torch_for_their_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPINS],
        cwd=ROOT,
        env=environment(GOMP_SPINCOUNT="INFINITE", OMP_NUM_THREADS="2"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout == "ok\n" and done.returncode == 0, done.stderr
