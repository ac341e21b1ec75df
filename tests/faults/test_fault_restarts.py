"""Tests run.resume=restart, and starts in a run directory in use, with the real program on two ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults import test_fault_stopping
from tests.faults.test_fault_stopping import files, latest, lines, wait_for
from tests.support.forked import Ranks

pytestmark = pytest.mark.slow


root = test_fault_stopping.root  # the fixture


def arguments(root: Path, name: str, *more: str) -> list[str]:
    return test_fault_stopping.arguments(
        root, name, "run.steps=2", "eval.every=null", "data.eval_path=null", *more
    )


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_mistakes_come_first_and_a_restart_keeps_the_earlier_run(root: Path, ranks: Ranks) -> None:
    run_dir, broken = root / "restarted", root / "broken.py"
    broken.write_text("def score(prompts, responses, rows)\n")
    assert ranks.run(2, arguments(root, "restarted"))[0] == [0, 0]
    before, first = names(run_dir), lines(run_dir)

    # a broken reward is reported before a changed seed
    for more in ((), ("run.resume=restart",)):
        codes, output = ranks.run(
            2, arguments(root, "restarted", "run.seed=7", f"reward.path={broken}:score", *more)
        )
        assert codes == [2, 2] and "was made with" not in output, output
        assert f"reward.path={broken}:score" in output and "SyntaxError" in output, output
        assert names(run_dir) == before and lines(run_dir) == first
    codes, output = ranks.run(2, arguments(root, "restarted", "run.seed=7"))
    assert codes == [2, 2] and output.count("was made with") == 1 and "run.resume=restart" in output, output
    assert names(run_dir) == before

    # a restarted run begins anew, is killed, and continues with the same command
    again = arguments(root, "restarted", "run.seed=7", "run.resume=restart", "checkpoint.every=1")
    run = ranks.start(2, again, fault="kill@checkpoint.before:at=2")
    assert ranks.wait(run) == [-9, -9], run.output()
    assert "earlier_1; changed settings: run.seed 0 -> 7" in run.output()
    assert lines(run_dir / "earlier_1") == first and latest(run_dir / "earlier_1") == 2
    codes, output = ranks.run(2, again)
    assert codes == [0, 0], output
    assert (
        "which is resumed" in output.replace("\n", " ").replace("│", "")
        and "resumed    after step 1" in output
    )
    assert not (run_dir / "earlier_2").exists()
    codes, output = ranks.run(2, arguments(root, "seven", "run.seed=7", "checkpoint.every=1"))
    assert codes == [0, 0], output
    assert lines(run_dir) == lines(root / "seven") and files(run_dir, 2) == files(root / "seven", 2)


def test_a_start_waits_for_a_run_that_was_told_to_stop(root: Path, ranks: Ranks) -> None:
    """Starts the second run while the first one finishes a slow save after SIGTERM."""
    run_dir, how = root / "told", ("run.steps=40",)
    first = ranks.start(2, arguments(root, "told", *how), fault="slow@checkpoint.before:seconds=5")
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and lines(run_dir), "no first step")
    os.kill(first.pids[1], signal.SIGTERM)
    time.sleep(2)
    second = ranks.start(2, [*arguments(root, "told", *how), "run.stop_at_step=41"], fault="stop@update:at=2")
    assert ranks.wait(first) == [143, 143], first.output()
    done = latest(run_dir)
    assert ranks.wait(second) == [143, 143], second.output()
    assert f"run.dir={run_dir}: waiting up to 60 s for the end of a run on" in second.output()
    assert latest(run_dir) > done
