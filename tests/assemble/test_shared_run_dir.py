"""Tests that a run directory that not all nodes share is refused at the start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.assemble import start
from ppo_ds.assemble.start import check_shared
from ppo_ds.errors import UserError
from ppo_ds.storage import shared_directory
from ppo_ds.storage.drafts import remove_drafts
from ppo_ds.storage.shared_directory import probe, sees_probe
from tests.integration.test_launchers import SMALL
from tests.support.ranks import RankServer


@dataclass
class Ranks:
    """Stands in for a World with several ranks, of which this process is rank 0."""

    others: Callable[[str], list[Any]]  # what the other ranks contribute to the last gather
    size: int = 2
    is_main: bool = True
    gathered: list[Any] = field(default_factory=list)

    def gather_objects(self, item: Any) -> list[Any]:
        self.gathered.append(item)
        name = self.gathered[0][0]
        return [item] if len(self.gathered) == 1 else [item, *self.others(name)]


def test_nothing_remains_and_nothing_is_refused_if_every_rank_sees_the_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    names = []

    def others(name: str) -> list[Any]:
        names.append(name)
        assert (run_dir / name).is_file()
        return [("node1", str(run_dir), True)]

    check_shared(run_dir, Ranks(others))
    assert names and not run_dir.exists()
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    check_shared(run_dir, Ranks(others))
    assert [file.name for file in run_dir.iterdir()] == ["config.yaml"] and names[0] != names[1]


def test_one_rank_writes_nothing(tmp_path: Path) -> None:
    check_shared(tmp_path / "a", Ranks(lambda name: [], size=1))
    assert not (tmp_path / "a").exists()


def test_nodes_that_do_not_see_it_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.platform, "node", lambda: "node0")

    def others(name: str) -> list[Any]:
        nodes = [("node0", True), ("node1", False), ("node1", False), ("node2", True)]
        return [(node, "/local/a", seen) for node, seen in nodes] + [
            (f"node{n}", "/local/a", False) for n in (3, 4, 5)
        ]

    with pytest.raises(UserError) as error:
        check_shared(tmp_path / "a", Ranks(others))
    (line,) = error.value.problems
    assert line == (
        f"run.dir={tmp_path}/a: rank 2 on node1 (/local/a), rank 5 on node3 (/local/a), rank 6 on node4 "
        f"(/local/a) and 1 more cannot see what rank 0 on node0 writes to {tmp_path}/a; choose a "
        "directory on a file system that all nodes share"
    )
    assert not (tmp_path / "a").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    class Refused(Ranks):
        def gather_objects(self, item: Any) -> list[Any]:
            return [item]

    with pytest.raises(UserError, match=f"run.dir={tmp_path}/file/a: cannot be written: Not a directory"):
        check_shared(tmp_path / "file" / "a", Refused(lambda name: []))


def test_a_kill_leaves_a_draft_that_the_next_start_deletes(tmp_path: Path) -> None:
    killed = [probe(tmp_path) for _ in range(2)]  # kept, since their end would delete the files
    killed[0].__enter__()
    (left,) = tmp_path.iterdir()
    with probe(tmp_path) as name:
        assert [file.name for file in tmp_path.iterdir()] == [name] != [left.name]
    killed[1].__enter__()
    remove_drafts(tmp_path)  # as open_run_directory does
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_appears_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory and the file appear at the third look, as after the caches of an NFS client expire."""
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "probe").touch()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(shared_directory, "VISIBLE_SECONDS", 600.0)
    assert sees_probe(tmp_path / "a", "probe") and len(looks) == 3


def test_directories_are_opened_before_the_probe_from_the_root_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = [], os.open

    def recorded(path: Any, *arguments: Any) -> int:
        opened.append(str(path))
        return real(path, *arguments)

    (tmp_path / "probe").touch()
    monkeypatch.setattr(os, "open", recorded)
    assert sees_probe(tmp_path, "probe")
    assert opened == [*map(str, reversed((tmp_path / "probe").parents)), str(tmp_path / "probe")]


def test_a_probe_that_never_appears_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_directory, "VISIBLE_SECONDS", 0.0)
    assert not sees_probe(tmp_path, "probe")


@pytest.mark.slow
def test_two_ranks_with_different_directories_end_with_code_2_and_one_line(
    tmp_path: Path, rank_server: RankServer
) -> None:
    arguments = [*(a for a in SMALL if not a.startswith("run.dir=")), "run.dir=runs/a"]
    codes, output = rank_server.run("tests.assemble.shared_dir_worker:main", 2, str(tmp_path), *arguments)
    lines = [line for line in output.splitlines() if "error" in line]
    assert codes == [2, 2], output
    assert len(lines) == 1 and "Traceback" not in output, output
    assert "error: run.dir=runs/a: rank 1 on " in lines[0]
    assert f"({tmp_path}/1/runs/a) cannot see what rank 0 on" in lines[0]
    assert f"writes to {tmp_path}/0/runs/a; choose a directory" in lines[0]
    assert [str(path) for path in tmp_path.rglob("*") if path.is_file()] == []
