"""Tests the Trackio tracker by reading its database, and that no failure of Trackio ends a run."""

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_ds.config.sections.run import TrackioConfig
from ppo_ds.tracking.background import BackgroundTracker
from ppo_ds.tracking.trackio import TrackioTracker
from ppo_ds.types import Histogram
from tests.tracking.test_wandb import ROW

pytest.importorskip("trackio")


@pytest.fixture(autouse=True)
def database(monkeypatch, tmp_path):
    """Keeps Trackio's database, and the home folder, in the folder of the test."""
    for name in [name for name in os.environ if name.startswith(("TRACKIO_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path / "trackio" / "p.db"


def run(*arguments):
    """Calls ``log_run`` in a process of its own, since Trackio reads the environment at its import."""
    script = "import sys; from tests.tracking.test_trackio import log_run; log_run(*sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def log_run(run_dir, steps="1"):
    os.makedirs(run_dir, exist_ok=True)
    config = TrackioConfig(enabled=True, project="p", name=None, space=None)
    one = BackgroundTracker(TrackioTracker(Path(run_dir), config, "n"))
    one.start({"run": {"seed": 1}})
    for step in map(int, steps.split()):
        one.log(step, {"policy/loss": step / 2, "value/loss": None, "time": 3.0})
    one.samples(1, [ROW | {"tokens": {"ids": [1]}}])
    one.histograms(1, {"adv/hist": Histogram([2, 1], [0.0, 1.0, 2.0])})
    one.event(1, "warning", "only files show it")
    one.event(1, "alarm", "kl/ref_seq_mean 30 is above 20")
    one.finish({"exit_reason": "done"})


def query(database, columns, table):
    with sqlite3.connect(database) as connection:
        return connection.execute(f"select {columns} from {table} order by id").fetchall()


def test_a_local_run_is_in_the_database_and_uses_no_network(tmp_path, database, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        done = run(tmp_path / "run")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()
    run_id = (tmp_path / "run" / "trackio.id").read_text().strip()
    rows = query(database, "run_name, step, metrics", "metrics")
    assert {row[:2] for row in rows} == {(f"n-{run_id}", 1)}
    shown = "".join(row[2] if isinstance(row[2], str) else row[2].decode() for row in rows)
    assert '"policy/loss":0.5' in shown and '"run_s":3.0' in shown and "value/loss" not in shown
    assert '"response":"19"' in shown and "tokens" not in shown
    assert '"bins":[0.0,1.0,2.0]' in shown and '"values":[2,1]' in shown
    assert [row[0] for row in query(database, "text", "alerts")] == ["kl/ref_seq_mean 30 is above 20"]
    assert 'trackio show --project "p"' in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_a_resumed_run_continues_and_another_run_of_the_same_name_does_not(tmp_path, database):
    for folder, steps in (("a", "1 2"), ("b", "1"), ("a", "2 3")):
        run(tmp_path / folder, steps)
    ids = {folder: (tmp_path / folder / "trackio.id").read_text().strip() for folder in "ab"}
    rows = query(database, "run_name, step, metrics", "metrics")
    steps = [(name, step) for name, step, metrics in rows if "policy/loss" in str(metrics)]
    assert [step for name, step in steps if name == f"n-{ids['a']}"] == [1, 2, 2, 3]
    assert [step for name, step in steps if name == f"n-{ids['b']}"] == [1]
