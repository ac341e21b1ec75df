"""Tests a run with another stage than PPO: a regression on two ranks.

A run that is killed must end bit-identical to an undisturbed run.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.tracking.jsonl import read_events, read_metrics
from tests.faults.test_fault_checkpoints import content
from tests.run.test_trace import spans
from tests.support.forked import Ranks
from tests.support.ranks import RankServer

STEPS = 6
ARGUMENTS = [
    "stage=toy", f"run.steps={STEPS}", "run.threads=1", "run.timeout_minutes=2", "actor.optim.lr=0.1",
    "eval.every=2", "checkpoint.every=2", "checkpoint.keep_last=9", "health.max_skips=2",
]  # fmt: skip


class Lab:
    def __init__(self, root: Path, ranks: Ranks):
        self.root, self.ranks = root, ranks
        # required because the optimizer's section is used, but not loaded; a folder is not downloaded
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")

    def run(self, name: str, *more: str, fault: str | None = None) -> tuple[list[int], str]:
        arguments = [*ARGUMENTS, f"actor.model.path={self.model}", f"run.dir={self.root / name}", *more]
        return self.ranks.run(2, arguments, fault=fault)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Lab:
    return Lab(tmp_path_factory.mktemp("toy"), Ranks(rank_server, main="tests.run.toy_stage:main"))


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> Path:
    codes, output = lab.run("undisturbed")
    assert codes == [0, 0], output
    return lab.root / "undisturbed"


def metrics(run: Path) -> list[dict[str, Any]]:
    skipped = re.compile("time/|time$|health/rank_time_spread_s|health/rollbacks")
    lines = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not skipped.match(key)} for line in lines]


def samples(run: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (run / "samples").iterdir()}


def events(run: Path) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in read_events(run / "events.jsonl")]


def assert_same_end(run: Path, other: Path) -> None:
    """Compares the last checkpoint (except the count of rollbacks), metrics, samples and the export."""
    ends = [content(folder / "checkpoints" / f"step_{STEPS:06d}") for folder in (run, other)]
    for end in ends:
        del end["state.json"]["state"]["progress"]["rollbacks"]
    assert ends[0] == ends[1]
    assert metrics(run) == metrics(other) and samples(run) == samples(other)
    first, second = ((folder / "model" / "model.safetensors").read_bytes() for folder in (run, other))
    assert first == second


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_a_second_stage_trains_is_evaluated_and_logged(undisturbed: Path) -> None:
    lines = metrics(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["toy/offset"] for line in lines] == [0.5**step for step in range(1, STEPS + 1)]
    assert [line["step"] for line in lines if "eval/score_mean" in line] == [2, 4, 6]
    found = summary(undisturbed)
    assert found["exit_reason"] == "done" and found["episodes"] == STEPS * 16
    assert found["heldout_score_mean_after"] > found["heldout_score_mean_before"]


def weights(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.rglob("model.safetensors"))]


def test_exports_and_a_trace_change_nothing_and_no_checkpoint_lacks_its_export(
    lab: Lab, undisturbed: Path
) -> None:
    """Kills the run between the export and the checkpoint of step 4, then within that export."""
    more = ("checkpoint.export_every=2", "run.profile=3")
    run = lab.root / "exports"
    root = run / "step_models"
    for fault, left in (("after_rename:at=2", []), ("before_rename", [".tmp_step_000004"])):
        codes, output = lab.run("exports", *more, fault=f"kill@export.{fault}:rank=0")
        assert -signal.SIGKILL in codes and 0 not in codes, output
        assert not (run / "checkpoints" / "step_000004").exists()
        assert sorted(path.name[:16] for path in root.iterdir()) == [*left, "step_000002", "step_000004"]
    codes, output = lab.run("exports", *more, fault="full@export.before_rename:at=1:rank=0")
    errors = [line for line in output.splitlines() if "error: " in line]
    assert codes == [1, 1] and len(errors) == 1 and "Traceback" not in output, output
    assert f"error: {root / 'step_000004'} was not written: [Errno 28] No space left" in errors[0]
    codes, output = lab.run("exports", *more)
    assert codes == [0, 0] and "resumed    after step 2" in output, output
    assert_same_end(run, undisturbed)
    assert sorted(path.name for path in root.iterdir()) == [f"step_00000{step}" for step in (2, 4, 6)]
    assert weights(root / "step_000006") == weights(run / "model") != weights(root / "step_000004")
    assert [path.name for path in (run / "profile").iterdir()] == ["step_000003"]
    assert {"time/draw", "time/update_regression"} <= {name for name, _ in spans(run / "profile/step_000003")}
    codes, output = lab.run("exports", *more)  # step 3 is over
    assert codes == [0, 0] and "run.profile=3: no trace, since the run resumes after step 6" in output


def test_a_killed_run_resumes_to_the_same_bits(lab: Lab, undisturbed: Path) -> None:
    codes, output = lab.run("killed", fault="kill@toy.loss:at=4:rank=1")
    assert -signal.SIGKILL in codes and 0 not in codes, output
    assert not (lab.root / "killed" / "checkpoints" / "step_000004").exists()
    codes, output = lab.run("killed")
    assert codes == [0, 0] and "resumed    after step 2" in output, output
    found = events(lab.root / "killed")  # rank 0 may have recorded the end of the first process
    assert (found[0], found[-2:]) == (("started", 0), [("resumed", 2), ("ended", STEPS)])
    assert_same_end(lab.root / "killed", undisturbed)
