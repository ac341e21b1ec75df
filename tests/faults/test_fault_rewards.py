"""Tests runs whose reward function scores in worker processes: their numbers, a stop, and leftovers."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.test_fault_stopping import arguments, files, latest, lines, marked, reason, wait_for
from tests.invariant import invariant_assets
from tests.support.forked import Ranks

REWARD = """
import os, signal

calls = 0


def score(prompts, responses, rows):
    \"\"\"Rewards "e" and "i" in each response by itself.

    STOP=N sends a signal to rank 1 in its worker's N-th call, which then never returns. FAIL=N raises in rank
    1's N-th call, FAIL=nan returns NaN.
    \"\"\"
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == int(os.environ.get("STOP") or -1):
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            pass
    if os.environ["RANK"] == "1" and os.environ.get("FAIL") == str(calls):
        rows[0]["missing"]
    if os.environ["RANK"] == "1" and os.environ.get("FAIL") == f"nan{calls}":
        return [float("nan")] * len(responses)
    return [0.5 * sum(map(text.count, "ei")) - 0.1 * len(text) for text in responses]

"""
IN_POOL = ("reward.pool=process", "reward.timeout_seconds=100000")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    invariant_assets.make(root)
    (root / "reward.py").write_text(REWARD)
    return root


@pytest.mark.slow
def test_a_pool_changes_no_number_and_a_stopped_run_continues_to_the_same_weights(
    root: Path, ranks: Ranks
) -> None:
    """One run scores all responses at once, one with three processes per rank, one with one process.

    In the last one, a call on rank 1 never returns. The signal must end both ranks within the patience of the
    test, with a checkpoint and without worker processes; the next start continues.
    """
    how = ("run.steps=3", "data.eval_path=null", "eval.every=null", "eval.train_prompts=0")
    assert ranks.run(2, arguments(root, "plain", *how))[0] == [0, 0]
    codes, output = ranks.run(2, arguments(root, "three", *how, *IN_POOL, "reward.workers=3"))
    assert codes == [0, 0], output
    assert lines(root / "three") == lines(root / "plain")
    assert files(root / "three", 3) == files(root / "plain", 3)

    mark = f"rewards_{uuid.uuid4().hex}"
    stopped = arguments(root, "stopped", *how, *IN_POOL, "reward.workers=1")
    # rank 1 scores 4 responses in each step
    run = ranks.start(2, stopped, STOP="6", MARK=mark)
    try:
        assert ranks.wait(run) == [143, 143], run.output()
        wait_for(lambda: not marked(mark), f"{marked(mark)} are left")
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert reason(root / "stopped") == "signal" and latest(root / "stopped") == 1
    codes, output = ranks.run(2, stopped)
    assert codes == [0, 0], output
    assert lines(root / "stopped") == lines(root / "plain")
    assert files(root / "stopped", 3) == files(root / "plain", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "fail", "shown"),
    [
        ("raises", (), "3", "KeyError: 'missing', in reward.path="),
        ("nan", (), "nan3", "reward.path="),
        ("in_a_pool", (*IN_POOL, "reward.workers=1"), "9", "KeyError: 'missing'"),
        (
            "evaluated",
            ("data.eval_path=null", "eval.train_prompts=4", "run.steps=2"),
            "4",
            "KeyError: 'missing'",
        ),
    ],
)
def test_a_reward_that_fails_on_one_rank_loses_no_step(
    root: Path, ranks: Ranks, name: str, more: tuple[str, ...], fail: str, shown: str
) -> None:
    """Two steps are done when rank 1 fails; all ranks save them, and the next start continues."""
    how = ("run.steps=3", "data.eval_path=null", "eval.every=null", "eval.train_prompts=0", *more)
    plain = arguments(root, f"{name}_plain", *how)
    assert ranks.run(2, plain)[0] == [0, 0]
    failing = arguments(root, name, *how)
    run = ranks.start(2, failing, FAIL=fail)
    assert ranks.wait(run) == [1, 1], run.output()
    output = run.output()
    last = [line for line in output.splitlines() if line.startswith("error: ")][-1]
    assert shown in last and f"step 2 is saved in {root / name}" in last and "the same command" in last
    assert "ppo_ds/" not in output.partition("traceback of")[2].partition("error: ")[0]
    assert reason(root / name) == "reward_error" and latest(root / name) == 2
    codes, output = ranks.run(2, failing)
    assert codes == [0, 0], output
    steps = 2 if name == "evaluated" else 3
    assert lines(root / name) == lines(root / f"{name}_plain")
    assert files(root / name, steps) == files(root / f"{name}_plain", steps)
