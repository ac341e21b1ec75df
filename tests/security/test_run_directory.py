"""Tests that files placed in a run directory by others do not redirect writes of a run or an export."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch import export
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.errors import UserError
from ppo_ds.run.record import open_run_directory
from ppo_ds.storage.run_directory import check_run_directory
from ppo_ds.storage.run_lock import acquire
from ppo_ds.tracking.jsonl import JsonlTracker
from tests.engine.test_checkpoint import OneRank
from tests.integration.launching import ROOT, TIMEOUT, environment
from tests.tools.test_export import write_run


@pytest.fixture
def victim(tmp_path):
    """Writes a file outside the run directory; it must be unchanged when the test ends."""
    file = tmp_path / "bashrc"
    file.write_text("alias ls='ls -l'\n")
    yield file
    assert file.read_text() == "alias ls='ls -l'\n", "a file elsewhere has been overwritten"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


# -- links under names that a writer may use ---------------------------------------------------------------


def test_metrics_and_summary_do_not_follow_links(run_dir, victim):
    (run_dir / "samples").mkdir()
    names = ("metrics.jsonl", "summary.json", "samples/step_000001.jsonl")
    for name in names:
        folder, _, base = f"{run_dir}/{name}".rpartition("/")
        os.symlink(victim, f"{folder}/.{base}.tmp")
    tracker = JsonlTracker(run_dir)
    tracker.log(1, {"x": 1.0})
    tracker.log(1, {"x": 2.0})  # replaces the line
    tracker.rewind(0)
    tracker.samples(1, [{"prompt": "p"}])
    tracker.finish({})
    assert all((run_dir / name).is_file() and not (run_dir / name).is_symlink() for name in names)


def test_pointers_and_drafts_of_checkpoints_do_not_follow_links(run_dir, victim, tmp_path):
    checkpoints = Checkpoints(run_dir / "checkpoints", world=OneRank(), keep_last=1)
    checkpoints.root.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    for name in ("latest", "best"):
        (checkpoints.root / f".tmp_{name}").symlink_to(victim)
    (checkpoints.root / "step_000001").symlink_to(elsewhere)
    (checkpoints.root / ".tmp_step_000002_0123456789abcdef").symlink_to(elsewhere)
    checkpoints.save(2, {}, {}, best=True)
    assert (checkpoints.root / "latest").read_text() == "step_000002\n"
    assert sorted(path.name for path in elsewhere.iterdir()) == ["mine"]


def test_an_export_does_not_write_through_a_link(tmp_path):
    run, elsewhere = write_run(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("mine")
    out = run / "exports" / "step_000002"
    out.mkdir(parents=True)
    (out / ".tmp_model").symlink_to(elsewhere)
    assert export.main([str(run)]) == 0
    assert (elsewhere / "config.json").read_text() == "mine" and len(list(elsewhere.iterdir())) == 1
    assert (out / "model" / "config.json").is_file() and not (out / "model").is_symlink()


@pytest.mark.parametrize("link", ["exports", "exports/step_000002", "exports/step_000002/model"])
def test_an_export_refuses_links_in_its_default_place(tmp_path, capsys, link):
    run, elsewhere = write_run(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / link).parent.mkdir(parents=True, exist_ok=True)
    (run / link).symlink_to(elsewhere / ("new" if link.endswith("model") else ""))
    assert export.main([str(run)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run / link}: is a symbolic link") and "OUT" in line
    assert list(elsewhere.iterdir()) == []


# -- the check before a run -----------------------------------------------------------------------------


def test_a_new_or_usual_directory_has_no_problem(run_dir, tmp_path):
    assert check_run_directory(tmp_path / "new") == check_run_directory(run_dir) == []
    for name in ("checkpoints", "samples", "dumps", "exports", "wandb"):
        (run_dir / name).mkdir()
    (run_dir / "wandb" / "latest-run").symlink_to("run-1")  # made by wandb
    (tmp_path / "link").symlink_to(run_dir)  # a link that the user names as the run directory is allowed
    assert check_run_directory(run_dir) == check_run_directory(tmp_path / "link") == []


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", ".metrics.jsonl.tmp", "checkpoints", "wandb", "checkpoints/latest"),
        *("checkpoints/step_000001", "samples/step_000001.jsonl", "exports/step_000001", "dumps/step_000001"),
        *("step_models/step_000001", "profile/step_000001"),
    ],
)
def test_a_link_is_refused(run_dir, tmp_path, name):
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).symlink_to(tmp_path / "target")
    with pytest.raises(UserError) as caught:
        open_run_directory(run_dir, {"run": {}}, None)
    assert str(caught.value) == (
        f"run.dir={run_dir}: {name} is a symbolic link, and the run would write to its target; replace it by "
        "a file or directory, or choose another run.dir"
    )
    assert not (run_dir / "config.yaml").exists()


def test_a_directory_that_every_user_may_write_is_refused(run_dir):
    run_dir.chmod(0o777)
    with pytest.raises(
        UserError, match=r"may be written by every user .*\(mode 0777\).*run chmod o-w .*run, or"
    ):
        check_run_directory(run_dir)
    run_dir.chmod(0o755)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints").chmod(0o1777)
    with pytest.raises(UserError, match="checkpoints may be written by every user"):
        check_run_directory(run_dir)
    run_dir.chmod(0o700)  # other users cannot reach the inner directory
    assert check_run_directory(run_dir) == []


@pytest.fixture
def owner(run_dir):
    """Gives the directory to another user if the tests run as root; returns the owner's id."""
    if os.geteuid() == 0:
        os.chown(run_dir, 4321, -1)
    return run_dir.stat().st_uid


@pytest.mark.parametrize(("user", "refused"), [("its owner", False), ("root", False), ("another", True)])
def test_a_directory_of_another_user_is_refused_except_for_root(run_dir, owner, monkeypatch, user, refused):
    user_id = {"its owner": owner, "root": 0, "another": owner + 1}[user]
    monkeypatch.setattr(os, "geteuid", lambda: user_id)
    if refused:
        with pytest.raises(UserError, match=r"run: belongs to the user .*, who could change it"):
            check_run_directory(run_dir)
    else:
        assert check_run_directory(run_dir) == []


def test_warnings_about_the_group_and_the_parent(run_dir):
    run_dir.chmod(0o770)
    (line,) = open_run_directory(run_dir, {"run": {}}, None)
    assert line == (
        f"warning    run.dir={run_dir}: its group may write to it, and could change the run's files; run "
        f"chmod g-w {run_dir}"
    )
    run_dir.chmod(0o700)
    run_dir.parent.chmod(0o777)
    (line,) = check_run_directory(run_dir)
    assert f"every user may rename it, since {run_dir.parent} is open to all" in line
    run_dir.parent.chmod(0o1777)  # only the owner of a directory may rename it, as in /tmp
    assert check_run_directory(run_dir) == []


def test_a_start_ends_with_one_line_before_it_writes_anything(run_dir, victim):
    (run_dir / ".metrics.jsonl.tmp").symlink_to(victim)
    arguments = [f"run.dir={run_dir}", "run.steps=1", "actor.model.path=a/b", "data.path=x/y"]
    arguments += ["rollout.prompts_per_step=1", "sampling.max_new_tokens=1", "reward=function"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "train.py"), *arguments, "reward.path=math:fsum"],
        env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: run.dir={run_dir}: .metrics.jsonl.tmp is a symbolic link")
    assert [path.name for path in run_dir.iterdir()] == [".metrics.jsonl.tmp"]


def test_reading_tools_warn(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    run.chmod(0o777)
    (run / "samples").symlink_to(tmp_path)
    assert export.main([str(run)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"warning: {run}: ")]
    assert len(lines) == 2
    assert "may be written by every user" in lines[0] and "samples is a symbolic link" in lines[1]


def test_a_lock_that_is_another_name_of_a_file_does_not_change_it(run_dir, victim):
    os.link(victim, run_dir / "run.lock")
    with pytest.raises(UserError, match=r"is not a regular file with one name \(.*run.lock\)"):
        acquire(run_dir)
