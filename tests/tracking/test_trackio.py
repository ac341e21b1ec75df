"""Tests the Trackio tracker by reading its database, and that no failure of Trackio ends a run."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys

import pytest

from ppo_ds.tracking.trackio import TrackioTracker
from ppo_ds.types import Histogram
from tests.tracking.test_wandb import LIMIT, ROW, alive

pytest.importorskip("trackio")


@pytest.fixture(autouse=True)
def database(monkeypatch, tmp_path):
    """Keeps Trackio's database, and the home folder, in the folder of the test."""
    for name in [name for name in os.environ if name.startswith(("TRACKIO_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path / "trackio" / "p.db"


def tracker(run_dir, **options):
    run_dir.mkdir(exist_ok=True)
    made = TrackioTracker(run_dir, project="p", name="n", **{"start_timeout": LIMIT, **options})
    made.start({"run": {"seed": 1}})
    return made


def query(database, columns, table):
    with sqlite3.connect(database) as connection:
        return connection.execute(f"select {columns} from {table} order by id").fetchall()


def test_a_run_is_in_the_database(tmp_path, database, capfd):
    one = tracker(tmp_path / "run")
    one.log(1, {"policy/loss": 0.5, "value/loss": None, "time": 3.0})
    one.samples(1, [ROW | {"tokens": {"ids": [1]}}])
    one.histograms(1, {"adv/hist": Histogram([2, 1], [0.0, 1.0, 2.0])})
    one.event(1, "warning", "only files show it")
    one.event(1, "alarm", "kl/ref_seq_mean 30 is above 20")
    one.finish({"exit_reason": "done"})
    run_id = (tmp_path / "run" / "trackio.id").read_text().strip()
    rows = query(database, "run_name, step, metrics", "metrics")
    assert {row[:2] for row in rows} == {(f"n-{run_id}", 1)}
    texts = [row[2] if isinstance(row[2], str) else row[2].decode() for row in rows]
    shown = "".join(texts)
    assert '"policy/loss":0.5' in shown and '"run_s":3.0' in shown and "value/loss" not in shown
    assert '"response":"19"' in shown and "tokens" not in shown
    assert '"bins":[0.0,1.0,2.0]' in shown and '"values":[2,1]' in shown
    assert [row[0] for row in query(database, "text", "alerts")] == ["kl/ref_seq_mean 30 is above 20"]
    out, err = capfd.readouterr()
    assert out == "trackio: to show: trackio show --project p\n" and err == ""


@pytest.mark.slow
def test_a_resumed_run_continues_and_another_run_of_the_same_name_does_not(tmp_path, database):
    for folder, steps in (("a", [1, 2]), ("b", [1]), ("a", [2, 3])):
        one = tracker(tmp_path / folder)
        for step in steps:
            one.log(step, {"policy/loss": float(step)})
        one.finish({})
    ids = {folder: (tmp_path / folder / "trackio.id").read_text().strip() for folder in "ab"}
    rows = query(database, "run_name, step", "metrics")
    assert [step for name, step in rows if name == f"n-{ids['a']}"] == [1, 2, 2, 3]
    assert [step for name, step in rows if name == f"n-{ids['b']}"] == [1]


@pytest.mark.slow
def test_a_local_run_with_a_token_uses_no_network(tmp_path, database, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        one = tracker(tmp_path / "run")
        one.log(1, {"policy/loss": 0.5})
        one.finish({})
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()
    assert query(database, "step", "metrics") == [(1,)] and capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_space_that_never_replies_costs_a_bounded_time(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        one = tracker(tmp_path / "run", space="me/space", start_timeout=5)
        one.log(1, {"policy/loss": 0.5})
        one.finish({})
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "no reply within 5 s" in err and "continuing without it" in err
    assert not (tmp_path / "run" / "trackio.id").exists()


@pytest.mark.slow
def test_trackio_hangs_during_the_run(tmp_path, capfd):
    one = tracker(tmp_path / "run", finish_timeout=1)
    process = one._child._process
    os.killpg(process.pid, signal.SIGSTOP)
    one.log(1, {"policy/loss": 0.5})
    one.finish({})
    assert process.poll() is not None
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "metrics.jsonl and samples/ have all of it" in err


def test_trackio_that_is_not_installed(tmp_path, monkeypatch, capfd):
    (tmp_path / "trackio_missing" / "trackio").mkdir(parents=True)
    text = "raise ModuleNotFoundError(\"No module named 'trackio'\", name='trackio')"
    (tmp_path / "trackio_missing" / "trackio" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "trackio_missing"))
    tracker(tmp_path / "run").finish({})
    assert capfd.readouterr().err == (
        "warning: trackio is not installed; run: pip install -c constraints.txt -e '.[trackio]'; "
        "continuing without it\n"
    )


@pytest.mark.slow
def test_a_killed_trainer_leaves_its_records_and_no_process(tmp_path, database):
    script = (
        "import os, sys; from ppo_ds.tracking.trackio import TrackioTracker as T\n"
        "t = T(sys.argv[1], project='p', name='n', start_timeout=600)\n"
        "t.start({}); t.log(1, {'last/words': 1.0})\n"
        "t._child._outbox.join()  # written to the pipe, from which the child reads it later\n"
        "print(t._child._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    )
    wait_for_end(int(killed.stdout.split()[-1]))
    assert b"last/words" in database.read_bytes() + wal(database)


def wait_for_end(group):
    import time

    deadline = time.monotonic() + LIMIT
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(group)


def wal(database):
    """Returns the write-ahead log of the database, which has records that the database itself lacks."""
    file = database.with_name(database.name + "-wal")
    return file.read_bytes() if file.exists() else b""
