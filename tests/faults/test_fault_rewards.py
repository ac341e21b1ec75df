"""Tests runs whose reward function scores in worker processes: their numbers, a stop, and leftovers."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.forked import Ranks
from tests.faults.test_fault_stopping import arguments, files, latest, lines, marked, reason, wait_for
from tests.invariant import invariant_assets

REWARD = """
import os, signal

calls = 0


def score(prompts, responses, rows):
    \"\"\"Rewards "e" and "i" in each response by itself.

    STOP=N sends a signal to rank 1 in its worker's N-th call, which then never returns.
    \"\"\"
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == int(os.environ.get("STOP") or -1):
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            pass
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
