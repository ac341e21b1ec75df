"""Tests the wandb tracker, offline and against a local server, and its failures."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import wandb as library

from ppo_ds.config.sections.run import WandbConfig
from ppo_ds.run.state import EXIT_CODES
from ppo_ds.tracking import wandb
from ppo_ds.tracking.background import BackgroundTracker
from ppo_ds.tracking.tracker import Trackers
from ppo_ds.tracking.wandb import SUCCESSFUL, WandbTracker
from ppo_ds.types import Histogram
from tests.tracking.wandb_server import wandb_server

ROW = {
    "prompt": "12+7=",
    "response": "19",
    "score": 1.0,
    "kl": None,
    "length": 3,
    "finish": "stop",
    "components": {"a": 0.5},
}
KEY, TOKEN = "0123456789abcdef" * 2 + "01234567", "hf_ThisIsNobodysTokenAtAll"
LIMIT = 120  # seconds; generous, because without a timeout a call would wait for wandb forever


@pytest.fixture(autouse=True)
def logged_out(monkeypatch, tmp_path):
    """Hides the user's own wandb login, and ends wandb's process after the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    yield
    for process in wandb_processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(Exception, SystemExit):  # the exit code of its process
        library.teardown()


def wandb_processes():
    """Returns the running processes of wandb that this process has started."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "wandb" in one.name() and one.status() != psutil.STATUS_ZOMBIE]


def tracker(run_dir, mode, **config):
    options = {"entity": None, "name": None, "tags": ["t"], "log_report": "never", "log_model": "never"}
    return BackgroundTracker(
        WandbTracker(Path(run_dir), WandbConfig(mode=mode, project="p", **options | config), "n")
    )


def run(run_dir, mode, steps=(1, 2, 3), finish=True, **config):
    """Logs metrics and a row of each step."""
    made = tracker(run_dir, mode, **config)
    made.start({"run": {"seed": 1}})
    for step in steps:
        made.log(step, {"policy/loss": float(step), "value/loss": None})
        made.samples(step, [ROW])
    if finish:
        made.finish({"exit_reason": "done"})
    return made


def stored(run_dir):
    """Returns the bytes of the ``.wandb`` file of an offline run."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    return file.read_bytes()


def write_outputs(run_dir):
    (run_dir / "report.html").write_text("<html>")
    (run_dir / "model" / "more").mkdir(parents=True)
    (run_dir / "model" / "more" / "weights.safetensors").write_bytes(b"0" * 1000)


def test_offline_creates_a_run(tmp_path, capfd):
    made = run(tmp_path, "offline", finish=False, log_report="end", log_model="end")
    made.histograms(1, {"adv/hist": Histogram([2, 0, 5], [-1.0, 0.0, 1.0, 2.0])})
    made.event(1, "warning", "a warning")
    made.event(1, "alarm", "kl/ref_seq_mean 30 is above 20; lower actor.optimizer.lr")
    write_outputs(tmp_path)
    made.finish({"exit_reason": "done"})
    content, run_id = stored(tmp_path), (tmp_path / "wandb.id").read_text().strip()
    assert b"policy/loss" in content and b"exit_reason" in content and b"seed" in content
    assert b"value/loss" not in content
    assert b'"histogram"' in content and b"[2,0,5]" in content and b"[-1,0,1,2]" in content
    assert b"step 1: kl/ref_seq_mean 30 is above 20" in content and b"a warning" not in content
    for kind, file in (("report", "report.html"), ("model", "weights.safetensors")):
        # the files are named in place, not copied
        assert f"{kind}-{run_id}".encode() in content and str(tmp_path / "model").encode() in content
        assert file.encode() in content
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.json"))
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [1, 1, 1], (
        "each step sends its own rows only"
    )
    out, err = capfd.readouterr()
    assert "wandb: offline; to upload: wandb sync" in out and err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("reason", "succeeded"), [("early_stop", True), ("signal", False)])
def test_only_a_successful_end_uploads_the_model(tmp_path, monkeypatch, reason, succeeded):
    """After any other end, the folder holds the model of an earlier one."""
    codes, finish = [], library.Run.finish
    monkeypatch.setattr(
        library.Run, "finish", lambda run, exit_code: codes.append(exit_code) or finish(run, exit_code)
    )
    made = run(tmp_path, "offline", [], finish=False, log_report="end", log_model="end")
    write_outputs(tmp_path)
    made.finish({"exit_reason": reason})
    assert b"report-" in stored(tmp_path) and (b"model-" in stored(tmp_path)) == succeeded
    assert codes == [0 if succeeded else 1]


def test_the_successful_ends_are_those_with_exit_code_0():
    assert {reason for reason, code in EXIT_CODES.items() if code == 0} == set(SUCCESSFUL)


def test_the_finish_waits_longer_for_a_model(tmp_path, monkeypatch):
    write_outputs(tmp_path)
    monkeypatch.setattr(wandb, "UPLOAD_RATE", 100)
    made = [tracker(tmp_path, "offline", log_model=when).dashboard for when in ("never", "end")]
    assert [one.finish_timeout for one in made] == [60, 70]


ALONE = """
import os, sys, types
from pathlib import Path
from tests.tracking.test_wandb import run, wandb_processes
made = run(sys.argv[1], sys.argv[2], finish=False)
"""


def alone(code, run_dir, mode, **options):
    """Starts a process that logs three steps and then runs ``code``."""
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", ALONE + code, str(run_dir), mode]
    return subprocess.Popen(command, env=env, start_new_session=True, **options)


@pytest.mark.slow
def test_a_server_that_does_not_answer_leaves_an_offline_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(wandb, "INIT_TIMEOUT", 3.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        run(tmp_path, "online")
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "wandb online failed" in err and "continuing offline" in err
    assert b"policy/loss" in stored(tmp_path)


@pytest.fixture
def server(monkeypatch):
    """Starts a local wandb server, and sets a valid key."""
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "*")
        server.artifacts = {}
        yield server


@pytest.mark.slow
def test_a_resumed_or_rolled_back_run_continues_the_same_wandb_run(tmp_path, server, capfd):
    run(tmp_path, "online", [1, 2, 3, 4])
    made = run(tmp_path, "online", [3, 4], finish=False)  # resumed from the checkpoint of step 2
    lines = [" ".join(process.cmdline()) for process in wandb_processes()]
    made.finish({"exit_reason": "done"})
    ((run_id, rows),) = server.history.items()
    assert (tmp_path / "wandb.id").read_text().strip() == run_id
    logged = [(row["_step"], row["step"], row["policy/loss"]) for row in rows if "policy/loss" in row]
    assert [step for _, step, _ in logged] == [loss for *_, loss in logged] == [1, 2, 3, 4, 3, 4]
    assert [counter for counter, *_ in logged] == sorted(counter for counter, *_ in logged)
    # The metric "step" is the x axis of all metrics: 1 is a metric's name, 2 a pattern, 5 the index of the
    # axis's entry, counted from 1, and 7 the values in the summary, of which an empty list is the last one.
    entries = server.configs[run_id]["_wandb"]["value"]["m"]
    named = {entry.get("1") or entry["2"]: entry for entry in entries}
    assert named["step"] == {"1": "step", "6": [3], "7": []} and named["*"]["7"] == []
    assert {entries[entry["5"] - 1]["1"] for entry in entries if entry is not named["step"]} == {"step"}
    assert capfd.readouterr().err == ""
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for secret in (KEY, TOKEN):
        assert secret.encode() not in files and secret not in json.dumps(server.configs) + "".join(lines)


@pytest.mark.slow
def test_alerts_report_and_model_reach_the_server(tmp_path, server, capfd):
    made = run(tmp_path, "online", [1], finish=False, log_report="end", log_model="end")
    made.event(1, "alarm", "kl/ref_seq_mean 30 is above 20")
    write_outputs(tmp_path)
    made.finish({"exit_reason": "done"})
    (run_id,) = server.history
    assert server.alerts == [("kl/ref_seq_mean 30 is above 20", "step 1: kl/ref_seq_mean 30 is above 20")]
    assert server.artifacts.items() >= {f"report-{run_id}": "report", f"model-{run_id}": "model"}.items()
    assert server.files["report.html"] == b"<html>"
    assert server.files["more/weights.safetensors"] == b"0" * 1000
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_table_that_the_server_refuses_affects_nothing_else(tmp_path, server, capfd):
    server.artifacts = None
    run(tmp_path, "online", [1, 2])
    assert server.tables >= 1
    (rows,) = server.history.values()
    assert [row["step"] for row in rows if "policy/loss" in row] == [1, 2]
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "wandb refused a table of samples" in err


@pytest.mark.slow
def test_wandb_gets_no_signal_of_the_terminal_and_ends_with_a_killed_run(tmp_path):
    code = "print(*[one.pid for one in wandb_processes()], flush=True); import time; time.sleep(1000)"
    child = alone(code, tmp_path, "offline", stdout=subprocess.PIPE, text=True)
    child.stdout.readline()  # the line that wandb has started
    processes = [psutil.Process(int(pid)) for pid in child.stdout.readline().split()]
    groups = {os.getpgid(one.pid) for one in processes}
    child.kill()
    assert groups and child.pid not in groups
    assert psutil.wait_procs(processes, LIMIT)[1] == []


def test_wandb_that_cannot_be_imported(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path, "online")
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "wandb is not installed" in err and "continuing without it" in err


@pytest.mark.slow
def test_odd_values(tmp_path, capfd):
    odd = {
        "half": "\ud800",
        "large": 10**30,
        "deep": [[{"": None}], {"a.b": {"1": float("inf")}}],
        "none": None,
        "lines": "a\r\n\u2028b",
        "empty": {},
    }
    trackers = Trackers([tracker(tmp_path, "offline")], max_samples=1)
    trackers.start(odd)
    trackers.log(1, {"fine": 1.0, "lost": float("nan"), "endless": float("-inf"), "../../up": 2.0, "": 3.0})
    trackers.samples(1, [])
    trackers.samples(1, [{"prompt": "\ud800\x00\x1b[31m", "score": float("nan"), "odd": {"a": {1}}}, ROW])
    trackers.samples(2, [{"prompt": 7, "response": None}])  # other columns and types
    trackers.log(2, {"last/words": 1.0})
    trackers.finish({"exit_reason": "done", "loss": float("nan")})
    assert b"last/words" in stored(tmp_path) and b"../../up" in stored(tmp_path)
    assert capfd.readouterr().err == ""
    assert {entry.name for entry in tmp_path.iterdir()} - {"home"} == {"wandb", "wandb.id"}


def test_packages_are_imported_only_when_they_are_used():
    script = (
        "import sys, ppo_ds.assemble.run, ppo_ds.assemble.ppo;"
        "print({'wandb', 'trackio', 'tensorboard', 'peft', 'bitsandbytes'} & sys.modules.keys())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shown.stdout.splitlines()[-1] == "set()"
