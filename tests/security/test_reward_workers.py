"""Tests what hostile code in a worker process of a reward function can do to the run and to other responses.

Code that a response contains may run in the process: it knows the descriptor of the connection, and finds the
number of the call on the stack.
"""

import json
import os
import signal
import threading
from contextlib import suppress

import psutil
import pytest

from ppo_ds.background.pool import start_thread
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.processes import FunctionRaised, WorkerFailed, WorkerProcess
from tests.rewards.conftest import tokenizer
from tests.rewards.test_pools import LIMIT, SAY, await_end, scored_by, stuck_calls_reach_their_limit

__all__ = ["scored_by", "stuck_calls_reach_their_limit", "tokenizer"]  # fixtures

ONE = {"pool": "process", "workers": 1, "timeout_seconds": LIMIT}
FORGE = """
import os, signal, socket, struct, subprocess, sys, threading

def forge(reply, size=None):
    frame = sys._getframe()
    while frame.f_code.co_name != "main":
        frame = frame.f_back
    reply = reply.replace(b"CALL", str(frame.f_locals.get("number")).encode())
    os.write(int(sys.argv[2]), struct.pack("!i", len(reply) if size is None else size) + reply)

"""
ATTACK = (
    FORGE + "def score(p, responses, r):\n    if responses[0] == 'bb': {}\n    return [len(responses[0])]"
)
HANG = "threading.Event().wait()"


def call(fields):
    return f'\'{{"call": "CALL", {fields}}}\'.encode()'


FORGED = {
    "a list": "b'[]'",
    "an empty object": "b'{}'",
    "no text": "b'\\xff'",
    "nothing": "b''",
    "a deep list": "b'[' * 100_000",
    "a deep object": "b'{\"a\":' * 100_000",
    "a long integer": "b'1' * 5_000",
    "no call": "b'{\"scores\": [99.0]}'",
    "another call": 'b\'{"call": "0123456789abcdef", "scores": [99.0]}\'',
    "a number": call('"scores": 5'),
    "a text": call('"scores": "9"'),
    "null": call('"scores": null'),
    "texts": call('"scores": ["x"]'),
    "no scores": call('"scores": []'),
    "two scores": call('"scores": [1.0, 2.0]'),
    "NaN": call('"scores": [NaN]'),
    "infinity": call('"scores": [[1.0, -Infinity]]'),
    "beyond float32": call('"scores": [1e39]'),
    "a huge integer": call('"scores": [1' + 400 * "0" + "]"),
    "a bool": call('"scores": [true]'),
    "a bool of a step": call('"scores": [[true]]'),
    "lists of lists": call('"scores": [[[1.0]]]'),
    **{f"{n} levels": call('"x": ' + n * "[" + n * "]") for n in range(700, 1000, 50)},
    "ready": call('"ready": true'),
    "a row out of range": call('"invalid": "x", "row": 7, "remedy": ""'),
    "a negative row": call('"invalid": "x", "row": -7, "remedy": ""'),
    "a row that is a float": call('"invalid": "x", "row": 0.0, "remedy": ""'),
    "a remedy that is no text": call('"invalid": "x", "row": 0, "remedy": 1'),
    "an error that is no text": call('"raised": 1, "where": "", "traceback": ""'),
}


@pytest.mark.parametrize("reply", FORGED.values(), ids=FORGED)
def test_forged_replies_are_refused_in_one_line(scored_by, tmp_path, reply):
    with pytest.raises(RewardError) as caught:
        scored_by(ATTACK.format(f"forge({reply})"), **ONE)
    line = str(caught.value)
    beginning = (
        f"reward.path={tmp_path}/mine.py:score gave no result: its worker process sent an invalid reply: "
    )
    assert line.startswith(beginning) and line.isprintable() and len(line) < 400 + len(str(tmp_path))
    assert "for row 1, prompt 'p1'; set reward.fallback_score" in line


def test_a_forged_reply_is_quoted_and_its_process_ended(scored_by, tmp_path):
    code = ATTACK.format(f"forge({FORGED['a number']})")
    code += f"\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')"
    assert scored_by(code, **ONE, fallback_score=-1).total.tolist() == [1, -1, 3, 0]
    run, *workers = (tmp_path / "pids").read_text().split()
    assert int(run) == os.getpid() and len(workers) == 2
    await_end(int(workers[0]))
    with pytest.raises(RewardError, match='"scores": 5'):
        scored_by(code, **ONE)


def test_a_forged_reason_is_escaped_and_cut(scored_by):
    reply = call('"invalid": "is ' + 9999 * "x" + '\\\\u001b[2J", "row": 0, "remedy": "\\\\u000a"')
    with pytest.raises(RewardError, match="mine.py:score is x") as caught:
        scored_by(ATTACK.format(f"forge({reply})"), **ONE)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 3000


def test_a_forged_error_is_escaped_and_cut(scored_by):
    trace = 99_999 * "x" + "\\\\u001b]0;title\\\\u0007\\\\nerror: forged"
    reply = call(f'"raised": "{9999 * "x"}\\\\u001b[2J", "where": "a\\\\u000ab", "traceback": "{trace}"')
    with pytest.raises(FunctionRaised) as caught:
        scored_by(ATTACK.format(f"forge({reply})"), **ONE)
    error = caught.value
    assert error.line.isprintable() and error.where.isprintable() and len(error.line) < 3000
    assert all(line.isprintable() for line in error.trace.split("\n")) and len(error.trace) < 30_000


@pytest.mark.parametrize("header", ["b'x', 5 * 2**20", "b'x', 2**31 - 1", "struct.pack('!Q', 10**10), -1"])
def test_a_message_that_is_too_long_is_refused_before_it_is_read(scored_by, header):
    with pytest.raises(
        RewardError, match="worker process sent an invalid reply: bad message length for row 1"
    ):
        scored_by(ATTACK.format(f"forge({header})"), **ONE)


def no_call_is_left(earlier):
    """Returns whether all calls have ended within a minute, except those of ``earlier`` tests."""
    calls = [thread for thread in threading.enumerate() if thread.name == "call in a pool"]
    for thread in set(calls) - set(earlier):
        thread.join(60)
        assert not thread.is_alive()
    return True


SILENT = {
    "an incomplete message": f"forge(b'x', 1000); {SAY}; {HANG}",
    "an incomplete header": f"os.write(int(sys.argv[2]), b'xx'); {SAY}; {HANG}",
    "a slow message": (
        f"forge(b'x', 4_000_000); {SAY}; "
        "[os.write(int(sys.argv[2]), b'x') and threading.Event().wait(0.01) for _ in iter(int, 1)]"
    ),
    "a stopped process": f"{SAY}; os.kill(os.getpid(), signal.SIGSTOP)",
    "a child that keeps the connection": (
        "subprocess.Popen(['sleep', '100'], pass_fds=[int(sys.argv[2])], start_new_session=True); "
        f"{SAY}; os._exit(0)"
    ),
}


@pytest.mark.parametrize("attack", SILENT.values(), ids=SILENT)
def test_a_silent_process_is_ended_at_the_time_limit(scored_by, attack):
    earlier = threading.enumerate()
    assert scored_by(ATTACK.format(attack), **ONE, fallback_score=-1).total.tolist() == [1, -1, 3, 0]
    assert no_call_is_left(earlier)


def test_a_silent_process_with_the_real_clock(scored_by, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(RewardError, match="gave no result within 1 s for row 1"):
        scored_by(ATTACK.format(f"forge(b'x', 1000); {HANG}"), **ONE | {"timeout_seconds": 1.0})


def test_a_closed_connection(scored_by):
    with pytest.raises(RewardError, match="worker process was killed by SIGKILL or closed its connection"):
        scored_by(ATTACK.format(f"os.close(int(sys.argv[2])); {HANG}"), **ONE)


def test_a_second_reply_is_not_the_reply_to_the_next_call(scored_by):
    attack = "; ".join(f"forge({call(scores)})" for scores in ('"scores": [7.0]', '"scores": [99.0]'))
    assert scored_by(ATTACK.format(attack), **ONE).total.tolist() == [1, 7, 3, 0]


def test_a_reply_that_is_sent_before_the_call_is_refused(scored_by):
    code = ATTACK.format("pass") + "\nif 'pytest' not in sys.modules: "
    code += "forge(b'{\"ready\": true}'); forge(b'{\"scores\": [99.0]}')"
    with pytest.raises(RewardError, match="invalid reply: .* for row 0"):
        scored_by(code, **ONE)


WITH_CHILD = (
    "import pathlib, subprocess, sys\n"
    "if 'pytest' not in sys.modules:\n"  # not where the test imports it
    "    child = subprocess.Popen(['sleep', '1000'], {})\n"
    "    pathlib.Path(__file__ + '.pid').write_text(str(child.pid))\n"
    "def score(p, texts, r): return [1.0]"
)


@pytest.fixture
def worker_with_child(tmp_path):
    """Returns a function that starts a process, whose function has started a child, and returns both."""
    workers = []

    def start(options=""):
        (tmp_path / "mine.py").write_text(WITH_CHILD.format(options))
        workers.append(WorkerProcess(f"{tmp_path}/mine.py:score"))
        assert json.loads(workers[0].exchange(None)) == {"ready": True}
        return workers[0], psutil.Process(int((tmp_path / "mine.py.pid").read_text()))

    yield start
    workers[0].end()


def test_children_of_a_process_that_has_ended_by_itself_end(worker_with_child):
    worker, child = worker_with_child()
    os.kill(worker._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    assert not worker.is_idle()
    assert worker.end() == "was killed by SIGKILL"
    await_end(child.pid)


@pytest.mark.parametrize("size", [1, 2**24])
def test_no_thread_waits_for_a_process_that_has_ended(worker_with_child, size):
    """Its child, which left its group, keeps the connection open; the arguments may not fit into a buffer."""
    worker, child = worker_with_child("start_new_session=True, pass_fds=[int(sys.argv[2])]")
    os.kill(worker._process.pid, signal.SIGSTOP)
    call = start_thread(worker.exchange, ("0", (["p"], ["x" * size], [{}])))
    with suppress(TimeoutError):
        call.exception(0.2)  # usually it waits then; the result does not depend on it
    worker.end()
    assert isinstance(call.exception(60), WorkerFailed)
    assert child.is_running()
    child.kill()
