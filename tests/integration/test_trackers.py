"""Tests a run with several trackers at once, which is stopped and resumed."""

import sqlite3

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.test_launchers import SMALL, launch

pytestmark = pytest.mark.slow
HISTOGRAMS = {"reward/score_hist", "rollout/resp_len_hist", "adv/hist", "policy/ratio_hist"}


def test_several_trackers_and_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    for name, value in {"HOME": tmp_path, "TRACKIO_DIR": tmp_path / "trackio", "HF_HUB_OFFLINE": 1}.items():
        monkeypatch.setenv(name, str(value))
    trackers, report = "tracker=[wandb_offline,tensorboard,trackio]", "tracker.wandb.log_report=end"
    for more in (["run.stop_at_step=2"], []):
        done = launch("python", *SMALL, "run.steps=3", trackers, report, *more, cwd=tmp_path)
        assert done.returncode == 0 and "warning: " not in done.stderr, done.stdout + done.stderr
        assert done.stdout.count("trackio show --project") == done.stdout.count("wandb: offline; ") == 1
    run = tmp_path / "run"
    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    assert [event.step for event in shown.Scalars("reward/score_mean")] == [1, 2, 3]
    assert HISTOGRAMS == set(shown.Tags()["histograms"])
    assert [event.step for event in shown.Histograms("policy/ratio_hist")] == [1, 2, 3]
    with sqlite3.connect(tmp_path / "trackio" / "ppo_ds.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    assert [step for step, text in rows if '"reward/score_mean"' in str(text)] == [1, 2, 3]
    assert [step for step, text in rows if '"policy/ratio_hist"' in str(text)] == [1, 2, 3]
    ids = [(run / f"{name}.id").read_text().strip() for name in ("wandb", "trackio")]
    first, second = (
        file.read_bytes() for file in sorted(run.glob(f"wandb/offline-run-*/run-{ids[0]}.wandb"))
    )
    assert all(name.encode() in first for name in HISTOGRAMS) and f"report-{ids[0]}".encode() in second
