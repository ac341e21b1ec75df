"""Tests phase times on the CPU and on a simulated GPU, memory errors, and requests to stop."""

import ctypes
import os
import signal
import sys
import threading
import time

import pytest
import torch

from ppo_ds.distributed.store import StoreClosed, StoreSilent
from ppo_ds.run.stopping import Abandoned, StopRequest
from ppo_ds.run.timing import PhaseTimer, compare_times

CPU = torch.device("cpu")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture
def clock(monkeypatch):
    """Replaces time.perf_counter by a clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def spend(clock, seconds):
    clock[0] += seconds


def test_phases_add_up_to_the_step(clock):
    timer = PhaseTimer(CPU)
    for seconds in (2.0, 3.0):
        with timer("generate"):
            spend(clock, seconds)
    with timer("values"):
        spend(clock, 1.0)
    spend(clock, 4.0)
    assert timer.take() == {"time/generate": 5.0, "time/values": 1.0, "time/other": 4.0, "time/step": 10.0}
    spend(clock, 1.5)
    # a new step begins where the previous one ended
    assert timer.take() == {"time/other": 1.5, "time/step": 1.5}


def test_a_phase_within_a_phase_is_not_counted_twice(clock):
    timer = PhaseTimer(CPU)
    with timer("eval"):
        spend(clock, 1.0)
        with timer("switch"):
            spend(clock, 2.0)
    with timer("switch"):
        spend(clock, 4.0)
    assert timer.take() == {"time/eval": 3.0, "time/switch": 4.0, "time/other": 0.0, "time/step": 7.0}


def test_a_phase_that_fails_is_counted_and_closed(clock):
    timer = PhaseTimer(CPU)
    with pytest.raises(ValueError), timer("reward"):
        spend(clock, 1.0)
        raise ValueError
    with timer("values"):
        spend(clock, 2.0)
    assert timer.take() == {"time/reward": 1.0, "time/values": 2.0, "time/other": 0.0, "time/step": 3.0}


class Device:
    """Simulates a GPU with one stream, in place of ``torch.cuda``.

    The host queues work that takes the device some seconds.
    """

    def __init__(self, clock):
        self.clock, self.free_at, self.waits = clock, 0.0, 0

    def work(self, seconds):
        self.free_at = self._reached() + seconds

    def _reached(self):
        """Returns the time at which the device reaches the work queued now."""
        return max(self.free_at, self.clock[0])

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self)

    def current_stream(self, device):
        return self

    def synchronize(self, device):
        self.waits += 1
        self.clock[0] = self._reached()


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream):
        assert stream is self.device
        self.at = self.device._reached()

    def elapsed_time(self, end):
        assert end.at <= self.device.clock[0], "not there yet"
        return 1000 * (end.at - self.at)


@pytest.fixture
def device(clock, monkeypatch):
    device = Device(clock)
    for name in ("Event", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    return device


def test_on_a_gpu_interleaved_phases_have_device_times_without_synchronisation(clock, device):
    timer = PhaseTimer(torch.device("cuda", 0))
    for _ in range(3):
        with timer("update_actor"):
            spend(clock, 0.25)  # the host queues the work, and continues long before the device has finished
            device.work(4.0)
        with timer("update_critic"):
            spend(clock, 0.25)
            device.work(2.0)
    assert device.waits == 0 and clock[0] == 101.5
    # the device begins 0.25 s late; this first quarter of a second of the host counts as update_actor, since
    # nothing else runs
    assert timer.take() == pytest.approx(
        {"time/update_actor": 12.25, "time/update_critic": 6.0, "time/other": 0.0, "time/step": 18.25}
    )
    assert device.waits == 1
    spend(clock, 1.5)
    assert timer.take() == {"time/other": 1.5, "time/step": 1.5}


def test_on_a_gpu_work_of_the_host_counts_where_the_device_is_idle(clock, device):
    timer = PhaseTimer(torch.device("cuda", 0))
    with timer("generate"):
        spend(clock, 1.0)
        device.work(2.0)
        device.synchronize(0)  # the host reads the responses
    with timer("reward"):
        spend(clock, 5.0)  # a reward function on the CPU
    with timer("values"):
        device.work(3.0)
    with timer("advantages"):
        spend(clock, 1.0)  # overlaps with the device's work
    spend(clock, 4.0)
    assert timer.take() == pytest.approx(
        {
            "time/generate": 3.0,
            "time/reward": 5.0,
            "time/values": 3.0,
            "time/advantages": 0.0,
            "time/other": 2.0,
            "time/step": 13.0,
        }
    )


@pytest.mark.parametrize(
    ("phase", "advice"),
    [
        ("generate", "; lower memory.rollout_tokens (it changes memory and speed, not the result)"),
        ("eval", "; lower memory.rollout_tokens or memory.score_tokens (it changes memory and speed, not the "
         "result)"),
        ("reward", "; lower memory.score_tokens (it changes memory and speed, not the result)"),
        ("update_critic", "; lower memory.train_tokens (it changes memory and speed, not the result)"),
        ("switch", "; set actor.zero.generation_gather=layers or actor.zero.offload_states=always"),
        ("checkpoint", ""),
    ],
)  # fmt: skip
def test_running_out_of_memory_names_the_phase_and_what_takes_less(phase, advice):
    with pytest.raises(torch.OutOfMemoryError) as caught, PhaseTimer(CPU)(phase):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert caught.value.__notes__ == [f"out of memory in the phase {phase!r}{advice}"]


@pytest.fixture
def handlers():
    """Makes an unhandled signal fail the test instead of ending the test process."""

    def unhandled(number, frame):
        raise AssertionError(f"signal {number} was not handled")

    before = {number: signal.signal(number, unhandled) for number in SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


class Board(dict):
    """Holds the messages between ranks in memory."""

    put = dict.__setitem__


class Rank:
    """Stands in for a world; it has only the rank."""

    def __init__(self, rank):
        self.rank, self.is_main = rank, rank == 0


@pytest.fixture
def listening(handlers):
    """Makes the stop requests of several ranks, which share a board."""

    def make(ranks=1, world=None, max_minutes=None, board=None):
        board = Board() if board is None else board
        stops = [StopRequest(world or Rank(rank), max_minutes, board) for rank in range(ranks)]
        for stop in stops:
            stop.install_handlers()  # only the last rank's handlers remain installed
        return stops

    return make


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_only_sets_a_flag(listening, world, number):
    (stop,) = listening(world=world)
    assert stop.agreed_reason() is None and not stop.should_stop()
    stop.raise_if_stopped()
    os.kill(os.getpid(), number)
    assert stop.should_stop() and stop.agreed_reason() == stop.agreed_reason() == "signal"
    with pytest.raises(Abandoned):
        stop.raise_if_stopped()


def test_without_installed_handlers_nothing_is_checked(world):
    stop = StopRequest(world, None, None)
    stop.poll()
    assert stop.agreed_reason() is None


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_one_rank_reaches_all_ranks_after_one_check_each(listening, caplog, number):
    others = listening(ranks=2)
    (mine,) = listening(world=Rank(2), board=others[0].store)
    os.kill(os.getpid(), number)
    assert [stop.should_stop() for stop in (mine, *others)] == [True, False, False]
    for stop in (mine, *others):
        stop.poll()
    assert all(stop.should_stop() for stop in others)
    (said,) = [record.getMessage() for record in caplog.records]  # exactly one message
    assert said.startswith(f"stopping: {signal.Signals(number).name} to rank 2;")
    for stop in (mine, *others):
        stop.poll()
    assert len(caplog.records) == 1


def test_a_signal_is_seen_while_the_main_thread_is_outside_python(listening):
    """In a collective that waits for another rank, a Python handler would run only after the collective."""
    (stop,) = listening()
    libc, barrier = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # a pthread_barrier_t has 32 bytes
    assert libc.pthread_barrier_init(barrier, None, 2) == 0
    handled, seen, gate = [], [], threading.Lock()
    signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))

    def other_thread():
        gate.acquire()
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 120
        while not stop.should_stop() and time.monotonic() < until:
            stop.poll()
        seen.append((stop.should_stop(), list(handled)))
        libc.pthread_barrier_wait(barrier)

    thread, interval = threading.Thread(target=other_thread), sys.getswitchinterval()
    gate.acquire()
    thread.start()
    # The other thread passes the gate once this thread releases the interpreter lock, which it does only for
    # the C call. Like a wait in a collective, a wait at the barrier continues after a signal.
    sys.setswitchinterval(1000)
    gate.release()
    libc.pthread_barrier_wait(barrier)
    sys.setswitchinterval(interval)
    thread.join()
    assert seen == [(True, [])] and handled == [signal.SIGTERM]


def test_a_signal_during_a_check_is_not_lost(listening):
    """Decoding may have ended because of the signal already, so later checks must report it too."""

    class Slow(Board):
        def get(self, name):
            os.kill(os.getpid(), signal.SIGTERM)  # the handler is called before this returns
            return None

    (stop,) = listening(board=Slow())
    stop.poll()
    assert stop.should_stop()


def test_the_end_of_the_launcher_counts_as_a_signal(listening, monkeypatch):
    monkeypatch.setattr("ppo_ds.run.stopping.launcher_pids", lambda: (17, 4))
    (stop,) = listening()
    stop.poll()
    assert not stop.should_stop()
    # the parent process has changed
    monkeypatch.setattr("ppo_ds.run.stopping.launcher_pids", lambda: ())
    stop.poll()
    assert stop.should_stop() and "launcher of rank 0" in stop.store["stop"]


def test_without_the_store_each_rank_uses_its_own_signals(listening, monkeypatch):
    class Dead:
        def put(self, name, text):
            raise StoreClosed

        def get(self, name):
            raise StoreClosed

    (stop,) = listening(board=Dead())
    stop.poll()
    assert not stop.should_stop()
    monkeypatch.setattr("ppo_ds.run.stopping.launcher_pids", lambda: (-1,))
    stop.poll()
    assert stop.should_stop()


def test_a_request_is_published_once_a_silent_store_answers_again(listening, monkeypatch):
    class Store(dict):
        silent = True

        def put(self, name, text):
            if self.silent:
                raise StoreSilent
            self[name] = text

    store = Store()
    (stop,) = listening(board=store)
    monkeypatch.setattr("ppo_ds.run.stopping.launcher_pids", lambda: (-1,))
    with pytest.raises(StoreSilent):
        stop.poll()
    assert stop.should_stop() and not store
    store.silent = False
    stop.poll()
    assert "launcher of rank 0" in store["stop"]


def test_a_time_limit_is_no_reason_to_abandon_a_step(listening, world, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (stop,) = listening(world=world, max_minutes=0.5)
    now[0] += 24.9
    stop.reserved = 5.0  # of the last evaluation
    assert stop.agreed_reason() is None
    now[0] += 0.2
    assert stop.agreed_reason() == "time_limit" and not stop.should_stop()
    stop.raise_if_stopped()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed_reason() == "signal"  # the signal has priority over other reasons


@pytest.mark.parametrize(
    ("flags", "late", "reason"),
    [
        ((False, True), (False, False), "signal"),
        ((False, False), (True, False), "time_limit"),
        ((True, False), (True, True), "signal"),
        ((False, False), (False, False), None),
    ],
)
def test_one_rank_stops_all(on_ranks, world, flags, late, reason):
    def work(world):
        stop = StopRequest(world, None, Board())
        stop._request = "SIGTERM" if flags[world.rank] else None
        stop.deadline = 0.0 if late[world.rank] else None
        found = stop.agreed_reason()
        try:
            stop.raise_if_stopped()
        except Abandoned:
            return found, "abandoned"
        return found, "goes on"

    assert on_ranks(2, work) == [(reason, "abandoned" if any(flags) else "goes on")] * 2


def test_the_clock_of_rank_0_is_that_of_all_ranks(on_ranks, monkeypatch):
    """Each rank is a thread and has its own clock."""
    clocks = {}
    monkeypatch.setattr("ppo_ds.run.timing.time.monotonic", lambda: clocks[threading.get_ident()])

    def work(world):
        clocks[threading.get_ident()] = (100.25, 9e9)[world.rank]
        return compare_times(world, (2.0, 5.0)[world.rank])

    assert on_ranks(2, work) == [({"health/rank_time_spread_s": 3.0}, 100.25)] * 2


def test_a_second_ctrl_c_ends_the_run_at_once_unless_a_launcher_forwarded_it(listening, monkeypatch):
    clock = iter([100.0, 100.5, 102.2])  # the limit of two seconds is counted from the first
    (stop,) = listening()
    monkeypatch.setattr("ppo_ds.run.stopping.time.monotonic", lambda: next(clock))
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # half a second later, so forwarded by the launcher
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_repeated_sigterm_and_one_later_ctrl_c_do_not_end_the_run_at_once(listening, monkeypatch):
    clock = iter([100.0, 110.0, 120.0, 130.0])
    (stop,) = listening()
    monkeypatch.setattr("ppo_ds.run.stopping.time.monotonic", lambda: next(clock))
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert stop.should_stop()
