"""Tests reward functions that run in the background: async ones, and those in a pool of threads or processes.

No test depends on time: where calls must overlap, one waits for the other.
"""

import asyncio
import os
import signal
import sys
from concurrent import futures
from contextlib import suppress
from multiprocessing import get_context

import psutil
import pytest
import torch

from ppo_ds.errors import UserError
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.function import FunctionReward
from ppo_ds.rewards.processes import FunctionRaised, WorkerProcess
from tests.rewards.reward_cases import make_rollout

ANSWERS = [("p0", "a"), ("p1", "bb"), ("p2", "ccc"), ("p3", "")]
IN_PROCESS = {"pool": "process", "workers": 2}
SAY = "open(__file__.replace('.py', '.stuck'), 'w').close()"
# holds the GIL, so that no thread of its process can end it
HANG = "import re; re.match('(a+)+$', 'a' * 64 + 'b')"
LIMIT = 1000.0  # a time limit that only a stuck call reaches


@pytest.fixture
def scored_by(tmp_path, tokenizer):
    """Returns a function that scores ANSWERS with a file of Python code that defines ``score``."""

    def run(code, **settings):
        (tmp_path / "mine.py").write_text(code)
        reward = FunctionReward(f"{tmp_path}/mine.py:score", tokenizer=tokenizer, **settings)
        return reward(make_rollout(tokenizer, ANSWERS, [{"n": n} for n in range(len(ANSWERS))]))

    return run


@pytest.fixture(autouse=True)
def stuck_calls_reach_their_limit(monkeypatch, tmp_path):
    """Ends the time limit of a call once the call has made the file mine.stuck; for one call at a time."""

    async def wait(futures, timeout=None):
        stuck = tmp_path / "mine.stuck"
        while timeout == LIMIT and not futures[0].done():
            if stuck.exists():
                stuck.unlink()
                return set(), set(futures)
            await asyncio.sleep(0.01)
        return await real_wait(futures, timeout=timeout)

    real_wait = asyncio.wait
    monkeypatch.setattr(asyncio, "wait", wait)


POOLS = {
    "async": ("async ", {}),
    "threads": ("", {"pool": "thread"}),
    "coroutines": ("async ", {"pool": "thread", "workers": 3}),
    "processes": ("", IN_PROCESS),
    "coroutines in processes": ("async ", IN_PROCESS),
}

IN_THE_RUN = [("", {}), *list(POOLS.values())[:3]]  # calls in the run's own process


@pytest.mark.parametrize(("kind", "settings"), POOLS.values(), ids=POOLS)
def test_scores_are_in_the_order_of_the_responses(scored_by, kind, settings):
    code = (
        f"{kind}def score(prompts, responses, rows):\n"
        "    rows[0]['n'] += 1; n = len(prompts); prompts.clear()\n"  # the lists are copies
        f"    assert n == {1 if settings else len(ANSWERS)}\n"
        "    return [len(text) for text in responses]"
    )
    scores = scored_by(code, **settings)
    assert scores.total.tolist() == [1, 2, 3, 0] and scores.total.dtype == torch.float32
    assert scores.components == {} and not scores.per_token.any()


CHAIN = """
from {module} import Event
events = [Event() for _ in range(5)]
events[4].set()
{kind}def score(prompts, responses, rows):
    n = rows[0]["n"]
    {wait}events[n + 1].wait()  # for the response after this one
    events[n].set()
    return [n]
"""


@pytest.mark.parametrize(("module", "kind", "wait"), [("threading", "", ""), ("asyncio", "async ", "await ")])
def test_calls_run_at_the_same_time_and_may_end_in_any_order(scored_by, module, kind, wait):
    code = CHAIN.format(module=module, kind=kind, wait=wait)
    assert scored_by(code, pool="thread", workers=4, timeout_seconds=100).total.tolist() == [0, 1, 2, 3]


def test_a_whole_batch_may_be_scored_by_one_coroutine(scored_by):
    """As TRL's users write it: one async function for all responses, which gathers its own calls."""
    code = (
        "import asyncio\n"
        "async def one(text):\n"
        "    await asyncio.sleep(0)\n"
        "    return len(text)\n"
        "async def score(prompts, responses, rows):\n"
        "    return await asyncio.gather(*map(one, responses))"
    )
    assert scored_by(code).total.tolist() == [1, 2, 3, 0]


def test_step_rewards_of_a_pool(scored_by):
    code = "def score(prompts, responses, rows): return [[0.5]] if responses[0] else [[]]"
    assert scored_by(code, **IN_PROCESS).sums.tolist() == [0.5, 0.5, 0.5, 0]


STUCK = {
    "process": f"def score(p, responses, r):\n    if responses[0] == 'bb': {SAY}; {HANG}\n    return [1.0]",
    "thread": "import threading\ndef score(p, responses, r):\n"
    f"    if responses[0] == 'bb': {SAY}; threading.Event().wait()\n    return [1.0]",
    "coroutine": "import asyncio\nasync def score(p, responses, r):\n"
    f"    if responses[0] == 'bb': {SAY}; await asyncio.Event().wait()\n    return [1.0]",
}


@pytest.mark.parametrize("kind", STUCK)
def test_a_call_that_never_returns_ends_with_the_fallback_score(scored_by, kind):
    settings = {"pool": "process" if kind == "process" else "thread", "workers": 1, "timeout_seconds": LIMIT}
    scores = scored_by(STUCK[kind], **settings, fallback_score=-0.5)
    assert scores.total.tolist() == [1, -0.5, 1, 1]
    assert {name: part.tolist() for name, part in scores.components.items()} == {"fallback": [0, 1, 0, 0]}


def test_without_a_fallback_score_a_call_that_never_returns_ends_the_run(scored_by, tmp_path, monkeypatch):
    """With a real time limit."""
    monkeypatch.undo()
    with pytest.raises(RewardError) as caught:
        scored_by(STUCK["process"], **IN_PROCESS, timeout_seconds=1.0)
    assert str(caught.value) == (
        f"reward.path={tmp_path}/mine.py:score gave no result within 1 s for row 1, prompt 'p1'; set "
        "reward.fallback_score to the score of such responses, or raise reward.timeout_seconds"
    )


@pytest.mark.parametrize(
    ("death", "how"),
    [("os._exit(3)", "ended with exit code 3"), ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV")],
)
def test_the_death_of_a_worker_process(scored_by, death, how):
    code = f"import os\ndef score(p, responses, r):\n    if responses[0] == 'bb': {death}\n    return [1.0]"
    assert scored_by(code, **IN_PROCESS, fallback_score=0.25).total.tolist() == [1, 0.25, 1, 1]
    words = f"gave no result: its worker process {how} for row 1, prompt 'p1'; .*of such responses$"
    with pytest.raises(RewardError, match=words):
        scored_by(code, **IN_PROCESS)


def test_processes_that_a_call_has_started_end_with_it(scored_by, tmp_path):
    code = (
        "import pathlib, subprocess\n"
        "def score(p, responses, r):\n"
        "    if responses[0] == 'bb':\n"
        "        child = subprocess.Popen(['sleep', '1000'])\n"
        "        pathlib.Path(__file__).with_name('child').write_text(str(child.pid))\n"
        f"        {SAY}\n"
        "        child.wait()\n"
        "    return [1.0]"
    )
    settings = {"pool": "process", "workers": 1, "timeout_seconds": LIMIT, "fallback_score": 0}
    assert scored_by(code, **settings).total.tolist() == [1, 0, 1, 1]
    await_end(int((tmp_path / "child").read_text()))


def await_end(pid):
    try:
        psutil.Process(pid).wait(60)
    except psutil.NoSuchProcess:
        pass


def hanging_worker(path, pids):
    worker = WorkerProcess(path)
    worker.exchange(None)
    pids.put(worker._process.pid)
    worker.exchange(("", (["p"], ["bb"], [{}])))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists on Linux only")
def test_a_worker_process_ends_with_its_rank_even_if_that_is_killed(tmp_path):
    (tmp_path / "mine.py").write_text(STUCK["process"])
    forking = get_context("fork")
    pids = forking.SimpleQueue()
    rank = forking.Process(target=hanging_worker, args=(f"{tmp_path}/mine.py:score", pids))
    rank.start()
    pid = pids.get()
    try:
        assert psutil.pid_exists(pid)
        os.kill(rank.pid, signal.SIGKILL)
        await_end(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    rank.join()


def test_an_exception_in_a_worker_process_shows_its_traceback(scored_by, tmp_path):
    with pytest.raises(FunctionRaised) as caught:
        scored_by("def score(p, r, rows):\n    return [1 / (rows[0]['n'] - 2)]", **IN_PROCESS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "ZeroDivisionError: division by zero" == lines[-1]
    assert f'File "{tmp_path}/mine.py", line 2, in score' in str(caught.value)
    assert caught.value.__notes__ == [
        f"in reward.path={tmp_path}/mine.py:score, scoring 1 responses; row 2 has the prompt 'p2'"
    ]


@pytest.mark.parametrize(("kind", "settings"), IN_THE_RUN, ids=str)
def test_other_exceptions_are_passed_on(scored_by, kind, settings):
    with pytest.raises(ZeroDivisionError) as caught:
        scored_by(f"{kind}def score(p, r, rows): return [1 / 0]", **settings)
    assert caught.traceback[-1].path.name == "mine.py" and "in reward.path=" in caught.value.__notes__[0]


@pytest.mark.parametrize("settings", [{}, {"pool": "thread"}])
def test_an_async_function_that_exits_ends_the_run(scored_by, settings):
    """It does not end the thread of the event loop, in which later calls would wait forever."""
    code = "import sys\nasync def score(p, r, rows): sys.exit(3)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            scored_by(code, **settings)


@pytest.mark.parametrize("settings", [{}, IN_PROCESS])
def test_invalid_scores_name_the_response(scored_by, settings):
    code = "async def score(p, r, rows): return [float('nan') if row['n'] == 2 else 1 for row in rows]"
    with pytest.raises(
        RewardError, match=r"returned 'nan' \(float\) for row 2, prompt 'p2'; a score must be"
    ):
        scored_by(code, **settings)


@pytest.mark.parametrize(("settings", "count"), [({}, 4), (IN_PROCESS, 1)])
def test_a_wrong_number_of_scores(scored_by, settings, count):
    with pytest.raises(RewardError, match=f"returned 2 scores for {count} responses$"):
        scored_by("async def score(p, r, rows): return [1, 2]", **settings)


def test_results_do_not_depend_on_the_number_of_processes(scored_by):
    """The function draws random numbers, and iterates over a set, in an order that depends on hashes."""
    code = (
        "import random\nimport numpy as np\n"
        "def score(prompts, responses, rows):\n"
        "    first = next(iter({'x', 'yy', 'zzz', *prompts}))\n"
        "    return [random.random() + np.random.rand() + len(first)]"
    )
    one, four = (scored_by(code, pool="process", workers=n).total for n in (1, 4))
    assert torch.equal(one, four) and len(set(one.tolist())) == len(ANSWERS)


@pytest.mark.parametrize(("kind", "settings"), IN_THE_RUN, ids=str)
def test_the_random_state_of_the_run_does_not_change(scored_by, kind, settings):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    scored_by(
        f"import torch\n{kind}def score(p, r, rows):\n    torch.manual_seed(0); return torch.rand(len(rows))",
        **settings,
    )
    assert torch.equal(torch.rand(4), expected)


def test_worker_processes_do_not_import_torch(scored_by):
    code = "import sys\ndef score(p, r, rows): return [float('torch' in sys.modules)]"
    assert scored_by(code, **IN_PROCESS).total.tolist() == [0, 0, 0, 0]


def test_a_worker_process_may_print(scored_by, capfd):
    assert scored_by("def score(p, r, rows):\n    print('hello'); return [1]", **IN_PROCESS).total.sum() == 4
    assert capfd.readouterr().out == "hello\n" * 4


@pytest.mark.parametrize("kind", STUCK)
def test_cancelled_calls_end(tmp_path, tokenizer, kind):
    (tmp_path / "mine.py").write_text(STUCK[kind])
    pool = "process" if kind == "process" else "thread"
    reward = FunctionReward(
        f"{tmp_path}/mine.py:score", pool=pool, workers=1, timeout_seconds=2000, tokenizer=tokenizer
    )
    pending = reward.start_scoring(make_rollout(tokenizer, ANSWERS))
    futures.wait(pending.tasks[:1], 100)
    assert not pending.wait(0.0)
    pending.cancel()
    futures.wait(pending.tasks, 100)
    assert pending.completed == len(ANSWERS)


def test_a_worker_that_cannot_import_the_function_ends_the_run(scored_by):
    code = "import os\nif os.environ.get('OMP_NUM_THREADS') == '1': raise OSError('no licence')\n"
    outside = os.environ.pop("OMP_NUM_THREADS", None)
    try:
        with pytest.raises(RewardError, match="could not import the reward function: .*no licence") as caught:
            scored_by(code + "def score(p, r, rows): return [1]", **IN_PROCESS, fallback_score=0)
        assert "\n" not in str(caught.value)
    finally:
        if outside is not None:
            os.environ["OMP_NUM_THREADS"] = outside


@pytest.mark.parametrize(("key", "value"), [("workers", 2), ("timeout_seconds", 5), ("fallback_score", 0.0)])
def test_settings_of_a_pool_need_a_pool(scored_by, key, value):
    with pytest.raises(
        UserError, match=f"^reward.{key}={value:g}: needs a pool; set reward.pool=process or "
    ):
        scored_by("def score(p, r, rows): return [1]", **{key: value})
