"""Tests checkpoints: resumed runs equal uninterrupted ones bit by bit, and damage is detected."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ppo_ds.engine import rng as rng_module
from ppo_ds.engine.checkpoint import checkpoints as checkpoint_module
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.checkpoint.files import CheckpointError, write_json, write_tensors
from ppo_ds.engine.checkpoint.shards import FORMAT, read_index
from ppo_ds.engine.checkpoint.state import model_bytes
from ppo_ds.engine.rng import load_rng, save_rng
from ppo_ds.errors import UserError
from ppo_ds.storage.drafts import draft_path
from tests.support.ranks import RankServer


def launch(server: RankServer, ranks: int, directory: Path, mode: str, worker: str) -> list[dict[str, Any]]:
    """Runs the module ``worker`` of this folder and returns its results."""
    server.check(f"tests.engine.{worker}:main", ranks, str(directory), mode)
    return json.loads((directory / f"{mode}-{ranks}.json").read_text())


def assert_exact(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert case["loaded"] and case["learned"], case
        assert case["steps"] and case["weights"], case
        assert case["shards"] > 1 and case["reads_its_share"], case


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer
) -> dict[str, list[dict[str, Any]]]:
    """Returns the results of 1 rank, of 2 ranks, and of 1 rank that reads the files of 2 ranks."""
    directory = tmp_path_factory.mktemp("checkpoints")
    return {
        name: launch(rank_server, ranks, directory, mode, "checkpoint_worker")
        for name, ranks, mode in (("one", 1, "all"), ("two", 2, "all"), ("back", 1, "references"))
    }


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(found: dict, ranks: str) -> None:
    cases = [case for case in found[ranks] if "learned" in case]
    assert len(cases) == 10
    assert_exact(cases)


def test_other_numbers_of_ranks_and_other_stages_read_the_same_weights(found: dict) -> None:
    cases = [case for case in found["two"] + found["back"] if "->" in case["case"]]
    assert len(cases) == 20
    for case in cases:
        assert case["weights"] and case["lr"], case
        assert case["gap"] < (1e-5 if "fp32" in case["case"] else 1e-2), case


def test_consolidated_weights_have_the_keys_and_ties_of_the_module(found: dict) -> None:
    for ranks in ("one", "two"):
        (case,) = [case for case in found[ranks] if case["case"] == "ties"]
        assert case["keys"] and case["tied"] and case["dtypes"] and case["shapes"], case


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_keeps_the_previous_checkpoint(found: dict) -> None:
    (case,) = [case for case in found["two"] if case["case"] == "whole run"]
    assert len(case["full"]) == 2 and len(set(case["full"])) == 1, case
    assert "rank 1" in case["full"][0] and "step_000006 was not written" in case["full"][0], case
    assert case["left"] == ["latest", "step_000003"], case
    assert case["latest"] and case["weights"] and case["steps"], case
    assert case["draws"] and case["draws_differ"], case
    assert all(0 <= written - foretold < 10_000 for written, foretold in case["bytes"]), case["bytes"]
    assert (
        case["state"]["kl"] == 0.1 and math.isnan(case["state"]["nan"]) and case["state"]["names"] == ["a"]
    ), case


@pytest.mark.slow
def test_resume_is_exact_with_fp16_and_offload_too(tmp_path: Path, rank_server: RankServer) -> None:
    found = launch(rank_server, 2, tmp_path, "full", "checkpoint_worker")
    assert len(found) == 23
    assert_exact(found)


# -- without models and a process group --------------------------------------------------------------


@dataclass(frozen=True)
class OneRank:
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather_objects(self, item: Any) -> list[Any]:
        return [item]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", world=OneRank(), keep_last=2)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.root.iterdir())


def test_keeps_the_last_ones_and_the_best(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(step, {}, {"at": step}, best=step == 2)
    assert names(checkpoints) == ["best", "latest", "step_000002", "step_000004", "step_000005"]
    assert (checkpoints.root / "latest").read_text().strip() == "step_000005"
    assert (checkpoints.root / "best").read_text().strip() == "step_000002"
    checkpoints.save(6, {}, {"at": 6}, best=True)
    assert names(checkpoints) == ["best", "latest", "step_000005", "step_000006"]


def test_state_is_restored(checkpoints: Checkpoints) -> None:
    state = {"kl": 0.1 + 0.2, "best": None, "tiny": 5e-324, "infinite": math.inf, "order": [3, 1, 2]}
    path = checkpoints.save(7, {}, state)
    assert checkpoints.load(path, {}) == state


def test_tensors_of_the_state_are_restored(checkpoints: Checkpoints) -> None:
    tokens = torch.arange(10**6)
    part = {"seen": 3, "tokens": tokens, "due": torch.tensor([0.1, math.inf], dtype=torch.float64)}
    path = checkpoints.save(1, {}, {"part": part | {"none": torch.tensor([], dtype=torch.bool)}, "other": 1})
    assert (path / "state.json").stat().st_size < 2000
    loaded = checkpoints.load(path, {})
    assert loaded["other"] == 1 and loaded["part"]["seen"] == 3
    assert torch.equal(loaded["part"]["tokens"], tokens) and torch.equal(loaded["part"]["due"], part["due"])
    assert loaded["part"]["none"].shape == (0,) and loaded["part"]["none"].dtype == torch.bool
    assert json.loads((path / "state.json").read_text())["state"]["part"]["tokens"] == "torch.LongTensor"
    with pytest.raises(AttributeError):
        checkpoints.save(2, {}, {"part": {"when": object()}})


def test_checkpoints_without_tensors_of_the_state_are_read(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(1, {}, {"part": {"seen": 3}})
    (path / "state.safetensors").unlink()
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["state.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoints.load(path, {}) == {"part": {"seen": 3}}


@pytest.mark.parametrize("name", ["other.tokens", "part", "flat.x"])
def test_tensors_of_no_part_are_one_line(checkpoints: Checkpoints, name: str) -> None:
    path = checkpoints.save(1, {}, {"part": {}, "flat": 1})
    if name == "part":
        (path / "state.safetensors").write_bytes(b"no tensors")
    else:
        save_file({name: torch.zeros(1)}, path / "state.safetensors")
    checkpoints.verified.add(path)
    with pytest.raises(CheckpointError, match=r"state.safetensors: is damaged: .*; use another checkpoint$"):
        checkpoints.load(path, {})


@pytest.mark.parametrize(
    ("key", "value"), [("state", [1]), ("step", -5), ("step", 10**30), ("world_size", "2"), ("models", {})]
)
def test_a_resume_from_a_state_with_other_types_or_ranges_is_one_line(
    checkpoints: Checkpoints, key: str, value: Any
) -> None:
    path = checkpoints.save(7, {}, {"progress": {"first_eval": {"a": 1, "b": math.nan}}})
    checkpoints.load(path, {})
    (path / "state.json").write_text(json.dumps(json.loads((path / "state.json").read_text()) | {key: value}))
    for read in (lambda: checkpoints.load(path, {}), lambda: checkpoints.settings_of(path)):
        with pytest.raises(UserError, match=f"state.json: {key}=") as caught:
            read()
        assert len(caught.value.problems) == 1


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("file", ["state.json", "rng_rank_00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
def test_damage_is_reported_and_the_previous_checkpoint_is_used(
    checkpoints: Checkpoints, file: str, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before, damaged = checkpoints.save(1, {}, {}), checkpoints.save(2, {}, {})
    harm(damaged / file)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == before
    (message,) = caplog.messages
    assert "step_000002" in message
    # if a hash in the manifest is flipped, the message names the file of this hash
    assert file in message or (file == "manifest.json" and harm is flip)
    with pytest.raises(UserError, match="run.resume: .*step_000002 is damaged"):
        checkpoints.load(damaged, {})
    checkpoints.verify(before)

    again = checkpoints.save(2, {}, {"second": True})  # replaces the damaged checkpoint
    assert checkpoints.latest() == again == damaged
    assert checkpoints.load(again, {}) == {"second": True}


def test_a_missing_path_is_an_error(checkpoints: Checkpoints) -> None:
    checkpoints.save(3, {}, {})
    with pytest.raises(
        UserError, match="run.resume: no such folder: .*step_9; checkpoints in .*: step_000003"
    ):
        checkpoints.load(checkpoints.root / "step_9", {})


def test_leftovers_of_a_killed_save_are_ignored_and_removed(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {}, {})
    left = draft_path(checkpoints.root / "step_000002") / "actor"
    left.mkdir(parents=True)
    (left / "model.json").write_text("{")
    draft_path(checkpoints.root / "latest").write_text("step")
    (checkpoints.root / "step_000002").mkdir()  # an empty folder is not a checkpoint of a run
    latest = checkpoints.latest()
    assert latest is not None and latest.name == "step_000001"
    checkpoints.save(3, {}, {})
    assert names(checkpoints) == ["latest", "step_000002", "step_000003"]


def test_going_back_deletes_later_checkpoints_at_the_next_save(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpoints.save(1, {}, {})
    checkpoints.save(5, {}, {}, best=True)
    with caplog.at_level(logging.WARNING):
        checkpoints.load(first, {})
    assert "step_000005" in caplog.text
    second = checkpoints.save(2, {}, {})
    assert names(checkpoints) == ["latest", "step_000001", "step_000002"]
    assert checkpoints.latest() == second


def test_a_write_that_fails_leaves_nothing(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoints.save(1, {}, {})

    def disk_full(path: Path, *_: Any, **__: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rng_module, "write_tensors", disk_full)
    with pytest.raises(CheckpointError, match="step_000002 was not written.*No space left on device"):
        checkpoints.save(2, {}, {})
    assert names(checkpoints) == ["latest", "step_000001"]
    assert checkpoints.latest() == before


def test_all_files_are_on_the_disk_before_the_checkpoint_exists(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Any]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recorded_rename(source: Any, target: Any) -> None:
        events.append(("rename", Path(target).name))
        rename(source, target)

    def recorded_replace(source: Any, target: Any) -> None:
        events.append(("rename", Path(target).name))
        replace(source, target)

    def save_model(model: None, directory: Path) -> list[Path]:
        directory.mkdir()
        write_tensors(directory / "shard-00000.safetensors", {"x": torch.ones(1)})
        write_json(directory / "model.json", {})
        return list(directory.iterdir())

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(os, "replace", recorded_replace)
    monkeypatch.setattr(checkpoint_module, "save_model", save_model)
    monkeypatch.setattr(checkpoint_module, "model_bytes", lambda model: 0)
    path = checkpoints.save(1, {"actor": None}, {}, best=True)

    def inode(file: Path) -> int:
        return file.stat().st_ino

    committed = events.index(("rename", path.name))
    before = {entry for _, entry in events[:committed]}
    assert {inode(file) for file in (path, *path.rglob("*"))} <= before
    root = ("fsync", inode(checkpoints.root))
    assert events[committed + 1] == root
    for pointer in ("latest", "best"):  # harm its text, then its name
        renamed = events.index(("rename", pointer))
        assert events[renamed - 1] == ("fsync", inode(checkpoints.root / pointer))
        assert events[renamed + 1] == root


def test_a_run_with_damaged_checkpoints_only_is_not_restarted(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        truncate(checkpoints.save(step, {}, {}) / "state.json")
    with pytest.raises(UserError) as error:
        checkpoints.latest()
    (line,) = error.value.problems
    assert line.startswith(
        f"run.resume=auto: all checkpoints in {checkpoints.root} are damaged: step_000002 (state.json has"
    )
    assert "step_000001 (state.json has" in line and "another run.dir" in line


def test_settings_are_stored(tmp_path: Path) -> None:
    settings = {"run": {"seed": 3, "dir": "x"}, "algo": {"kl": {"coef": 0.05}}}
    checkpoints = Checkpoints(tmp_path / "checkpoints", world=OneRank(), keep_last=2, settings=settings)
    assert checkpoints.settings_of(checkpoints.save(1, {}, {})) == settings


def test_the_number_of_ranks_is_stored(tmp_path: Path) -> None:
    pair = Checkpoints(tmp_path / "checkpoints", world=OneRank(size=2), keep_last=2)
    path = pair.save(1, {}, {})
    assert Checkpoints(pair.root, world=OneRank(), keep_last=2).world_size_of(path) == 2


@dataclass(frozen=True)
class Disk:
    free: int


def test_a_lack_of_disk_space_is_reported_before_anything_is_written(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoints.save(1, {}, {})
    checkpoints.check_disk_space({})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(free=500_000))
    monkeypatch.setattr(checkpoint_module, "save_rng", None)  # saving must fail before this is called
    with pytest.raises(CheckpointError) as error:
        checkpoints.save(2, {}, {})
    for part in (
        "step_000002 was not written",
        "it takes 0.00105 GB, 0.0005 GB are free in",
        "checkpoint.keep_last",
        "run.dir",
    ):
        assert part in str(error.value), part
    assert names(checkpoints) == ["latest", "step_000001"] and checkpoints.latest() == before
    with pytest.raises(
        UserError,
        match=f"run.dir={checkpoints.root.parent}: no space for a checkpoint: "
        "it takes 0.00105 GB, 0.0005 GB are free",
    ):
        checkpoints.check_disk_space({})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(free=2_000_000))
    checkpoints.check_disk_space({}, more=900_000)
    with pytest.raises(UserError, match="no space for checkpoint and export: it takes 0.00205 GB"):
        checkpoints.check_disk_space({}, more=1_000_000)


def test_checkpoints_that_a_kill_left_are_pruned_at_the_next_start(tmp_path: Path) -> None:
    generous = Checkpoints(tmp_path / "checkpoints", world=OneRank(), keep_last=9)
    for step in (1, 2, 3, 4):
        generous.save(step, {}, {}, best=step == 1)
    (generous.root / "step_000004" / "state.json").unlink()  # damages the newest checkpoint
    again = Checkpoints(tmp_path / "checkpoints", world=OneRank(), keep_last=1)
    latest = again.latest()
    assert latest is not None and names(again) == [
        "best",
        "latest",
        "step_000001",
        "step_000002",
        "step_000003",
        "step_000004",
    ]
    again.load(latest, {})
    assert names(again) == ["best", "latest", "step_000001", "step_000003", "step_000004"]

    elsewhere = Checkpoints(tmp_path / "other" / "checkpoints", world=OneRank(), keep_last=1)
    elsewhere.load(latest, {})  # does not prune another run's folder
    assert names(again) == ["best", "latest", "step_000001", "step_000003", "step_000004"]


def test_other_models_than_saved_are_refused(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(1, {}, {})
    with pytest.raises(UserError, match="run.resume: .* this run trains actor"):
        checkpoints.load(path, {"actor": None})


@pytest.mark.parametrize(
    ("trained", "difference"),
    [(["a"], "it has b, which the model lacks .1 in all."), (["a", "b", "c"], "it lacks c .1 in all.")],
)
def test_a_checkpoint_with_other_parameters_is_refused(
    tmp_path: Path, trained: list[str], difference: str
) -> None:
    index = {"format": FORMAT, "shards": dict.fromkeys("ab", "shard-00000.safetensors")}
    file = tmp_path / "model.json"
    file.write_text(json.dumps(index))
    assert read_index(file, ["b", "a"]) == index
    with pytest.raises(UserError, match=f"^key: .* was saved from another model: {difference}"):
        read_index(file, trained, key="key: ")


def test_the_estimate_of_a_checkpoint_counts_weights_moments_and_buffers() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5, affine=False))
    module[0].bias.requires_grad_(False)
    # three fp32 numbers for each of 15 weights; two vectors of 5 and a counter of 8 bytes
    assert model_bytes(SimpleNamespace(module=module)) == 3 * 4 * 15 + 2 * 4 * 5 + 8


def draws() -> list[float]:
    return [
        torch.rand(()).item(),
        float(np.random.normal()),
        float(np.random.normal()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_random_states_are_restored(tmp_path: Path) -> None:
    draws()  # numpy and python draw normals in pairs, and now hold the second draw of a pair
    save_rng(tmp_path, OneRank())
    expected = draws()
    draws()
    load_rng(tmp_path, OneRank())
    assert draws() == expected


def test_a_new_rank_draws_its_own_numbers(tmp_path: Path) -> None:
    save_rng(tmp_path, OneRank())
    expected = draws()
    new = []
    for rank in (1, 2, 1):
        load_rng(tmp_path, OneRank(rank=rank, size=3))
        new.append(draws())
    assert new[0] == new[2]
    assert all(a != b for a, b in zip(new[0], new[1], strict=True))
    assert all(a != b for a, b in zip(new[0], expected, strict=True))
