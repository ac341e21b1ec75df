"""Tests the protocols of a run on 64 ranks: each rank is a forked process, connected by gloo, without models.

The ranks exchange rows and messages, stop together and save checkpoints; a rank fails, another hangs. Then 48
ranks resume, and 64 ranks resume from the checkpoint of the 48.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.distributed.open_files import open_files_needed
from tests.faults.many_ranks_worker import FAILING, FULL_DISK, SOFT_LIMIT
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow

RANKS, FEWER = 64, 48
PATIENCE = 900.0  # seconds until ranks that do not end are killed


class Parts:
    """Runs the parts of the worker and holds what each rank observed, its exit code and the output."""

    def __init__(self, folder: Path, server: RankServer):
        self._folder, self._server = folder, server
        self.codes: dict[str, list[int]] = {}
        self.output: dict[str, str] = {}
        self.found: dict[str, list[dict[str, Any]]] = {}

    def run(self, name: str, ranks: int) -> None:
        (self._folder / name).mkdir()
        group = self._server.start(f"tests.faults.many_ranks_worker:{name}", ranks, str(self._folder))
        self.codes[name] = self._server.wait(group, limit=PATIENCE, grace=None)
        self.output[name] = group.output()
        files = [self._folder / name / f"rank{rank}.json" for rank in range(ranks)]
        assert all(file.exists() for file in files), self.output[name][-6000:]
        self.found[name] = [json.loads(file.read_text()) for file in files]

    def same(self, name: str, key: str) -> Any:
        """Returns what all ranks observed, and asserts that they observed the same."""
        values = [found[key] for found in self.found[name]]
        assert all(value == values[0] for value in values), (key, values)
        return values[0]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Parts:
    parts = Parts(tmp_path_factory.mktemp("many"), rank_server)
    parts.run("first", RANKS)
    parts.run("fewer", FEWER)
    parts.run("again", RANKS)
    return parts


def test_every_rank_has_the_rows_of_all_ranks(parts: Parts) -> None:
    expected = []
    for rank in range(RANKS):
        prompt, response = 1 + rank % 5, 1 + rank % 7
        for row, length in ((2 * rank, response), (2 * rank + 1, 1)):
            expected.append([[rank] * (prompt + length), length, -rank / 8 * length, row])
    assert parts.same("first", "rows") == expected


def test_messages_reach_all_ranks_and_counts_are_atomic(parts: Parts) -> None:
    assert parts.same("first", "received") == [f"message {rank}" for rank in range(RANKS)]
    assert parts.same("first", "absent") is None
    assert sorted(found["count"] for found in parts.found["first"]) == list(range(1, RANKS + 1))


def test_more_files_are_open_than_the_soft_limit_allowed(parts: Parts) -> None:
    files = [found["files"] for found in parts.found["first"]]
    assert SOFT_LIMIT < files[0] == max(files) <= open_files_needed(RANKS)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(parts: Parts) -> None:
    assert parts.same("first", "stopped at") >= 3
    assert parts.same("first", "reason") == "signal"
    assert parts.same("first", "told") is True


def test_a_checkpoint_is_complete_or_absent(parts: Parts) -> None:
    assert parts.same("first", "after 1") == ["latest", "step_000001"]
    assert parts.same("first", "after 2") == ["latest", "step_000001"]
    assert parts.same("first", "after 3") == ["latest", "step_000001", "step_000003"]
    refused = parts.same("first", "refused")
    assert "step_000002 was not written, older checkpoints are unchanged: " in refused
    assert re.findall(r"rank (\d+):", refused) == [str(FULL_DISK)]


def test_all_ranks_learn_why_one_failed(parts: Parts) -> None:
    assert parts.codes["first"] == [1] * RANKS
    output = parts.output["first"]
    reason = r"ValueError: a tensor of 3 elements\nin a row of 4"
    for rank in range(RANKS):
        line = f"rank {rank}: stopped because rank {FAILING} failed ({reason})"
        assert output.count(line) == (rank != FAILING), rank
    assert output.count("Traceback") == 1 and f"rank {FAILING} failed:\nTraceback" in output, output[-6000:]


def test_all_ranks_end_if_one_hangs(parts: Parts) -> None:
    assert parts.codes["fewer"] == [1] * FEWER
    reports = re.findall(
        r"^rank (\d+): stuck \(no progress on (?:any rank|rank \d+) for 3 s;", parts.output["fewer"], re.M
    )
    assert sorted(map(int, reports)) == list(range(FEWER)), parts.output["fewer"][-6000:]


def test_another_number_of_ranks_resumes(parts: Parts) -> None:
    for name, folder, ranks in (("fewer", "step_000003", RANKS), ("again", "step_000004", FEWER)):
        assert parts.same(name, "from") == folder and parts.same(name, "ranks") == ranks
        assert parts.same(name, "equal") is True
    assert parts.codes["again"] == [0] * RANKS and parts.output["again"] == ""


def test_ranks_continue_their_random_numbers_and_new_ranks_get_others(parts: Parts) -> None:
    first, fewer, again = (parts.found[name] for name in ("first", "fewer", "again"))
    assert [found["drawn"] for found in fewer] == [found["next"] for found in first[:FEWER]]
    assert [found["drawn"] for found in again[:FEWER]] == [found["next"] for found in fewer]
    assert len({found["drawn"] for found in again}) == RANKS
