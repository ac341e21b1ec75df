"""Tests that texts of a checkpoint or a dump cannot control the terminal in which tools print them."""

from __future__ import annotations

import json
import logging

import pytest

from launch import export, replay
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints, damage_of
from ppo_ds.errors import printable
from ppo_ds.ppo.failure_dump import Dump
from ppo_ds.run.nan_debug import ReplayedRow
from ppo_ds.tools.replay import Replay
from ppo_ds.tracking.banner import Banner
from tests.engine.test_checkpoint import OneRank
from tests.tools.test_export import STEP, write_run

EVIL = "\x1b]0;title\x07\x1b[2Jx\r\u202eevil\nerror: y"  # sets the title, clears the screen, reverses text


def is_safe(text):
    return all(line.isprintable() for line in text.split("\n"))


def test_escapes_are_visible_and_usual_text_is_unchanged():
    assert printable(EVIL) == r"\x1b]0;title\x07\x1b[2Jx\r\u202eevil\nerror: y"
    assert printable("größer → 漢字 ✓") == "größer → 漢字 ✓"


def test_a_replay_prints_texts_of_a_dump_with_escapes(tmp_path, monkeypatch, capsys):
    rows = [{"row_of_the_rollout": 0, "prompt": EVIL}]
    dump = Dump(1, EVIL, 0, 0, 0.0, False, rows, None)
    result = Replay(dump, EVIL, [ReplayedRow(0, 0, {EVIL: 1.0}, EVIL)])
    monkeypatch.setattr("ppo_ds.tools.replay.replay", lambda *_, **__: result)
    assert replay.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert is_safe(out) and r"\x1b]0;title" in out
    assert not [line for line in out.splitlines() if line.startswith("error")]


@pytest.mark.parametrize("kind", ["missing", "changed"])
def test_names_in_a_manifest_are_escaped(tmp_path, capsys, caplog, kind):
    run = write_run(tmp_path / "run")
    manifest = run / STEP / "manifest.json"
    about = json.loads(manifest.read_text())
    about["files"][f"actor/{EVIL}"] = {"bytes": 1, "sha256": "0"}
    manifest.write_text(json.dumps(about))
    if kind == "changed":
        (run / STEP / "actor" / EVIL).write_text("1")
    (problem,) = damage_of(run / STEP)
    assert problem.isprintable() and r"\x1b]0;title" in problem
    capsys.readouterr()
    assert export.main([str(run)]) == 2
    assert is_safe(capsys.readouterr().err)

    checkpoints = Checkpoints(run / "checkpoints", world=OneRank(), keep_last=9)
    damaged = (run / STEP).rename(tmp_path / "kept")
    checkpoints.save(1, {}, {})
    damaged.rename(run / "checkpoints" / "step_000009")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == run / "checkpoints" / "step_000001"
    assert "damaged and skipped" in caplog.text and is_safe(caplog.text)


def test_the_banner_shows_settings_of_a_checkpoint_with_escapes():
    banner = Banner()
    banner.summarize("model      a")
    banner.note(f"changed    since the checkpoint: reward.x {EVIL} -> 1", "a\nb")
    assert is_safe(banner.render()) and r"\x1b]0;title" in banner.render()
