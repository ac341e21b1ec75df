"""Tests that a run continues after any failure of wandb: no key, no server, no reply, no process."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

from ppo_ds.tracking.child import read_run_id
from ppo_ds.tracking.tracker import Trackers
from ppo_ds.tracking.wandb import WandbTracker
from ppo_ds.tracking.wandb_child import WandbClient
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


LIMIT = 120  # seconds; generous, because without a timeout a call would wait for wandb forever


@pytest.fixture(autouse=True)
def logged_out(monkeypatch, tmp_path):
    """Hides the user's own wandb login, and gives the child process time to start on a busy machine."""
    monkeypatch.setattr("ppo_ds.tracking.wandb.START_MARGIN", LIMIT)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def run(run_dir, mode, **timeouts):
    """Logs three steps and returns the seconds that each call took."""
    tracker, spent = WandbTracker(run_dir, mode=mode, project="p", name="n", tags=["t"], **timeouts), []

    def call(function, *arguments):
        begin = time.monotonic()
        function(*arguments)
        spent.append(time.monotonic() - begin)

    call(tracker.start, {"run": {"seed": 1}})
    for step in (1, 2, 3):
        call(tracker.log, step, {"policy/loss": 0.5, "value/loss": None})
        call(tracker.samples, step, [ROW])
    call(tracker.finish, {"exit_reason": "done"})
    return spent


def stored(run_dir):
    """Returns the bytes of the ``.wandb`` file of an offline run."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    return file.read_bytes()


def test_offline_creates_a_run(tmp_path, capfd):
    run(tmp_path, "offline")
    content = stored(tmp_path)
    assert b"policy/loss" in content and b"exit_reason" in content and b"seed" in content
    assert b"value/loss" not in content
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.json"))
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [1, 1, 1], (
        "each step sends its own rows only"
    )
    out, err = capfd.readouterr()
    assert "wandb sync" in out and err == ""


def test_offline_keeps_histograms_alerts_report_and_model(tmp_path, capfd):
    tracker = WandbTracker(
        tmp_path, mode="offline", project="p", name="n", log_report=True, log_model=True, start_timeout=LIMIT
    )
    tracker.start({})
    tracker.log(1, {"reward/score_mean": 0.75})
    tracker.histograms(1, {"adv/hist": Histogram([2, 0, 5], [-1.0, 0.0, 1.0, 2.0])})
    tracker.samples(1, [ROW | {"tokens": {"ids": [987654321]}}])
    tracker.event(1, "warning", "a warning")
    tracker.event(1, "alarm", "kl/ref_seq_mean 30 is above 20; lower actor.optimizer.lr")
    (tmp_path / "report.html").write_text("<html>")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.safetensors").write_bytes(b"0" * 1000)
    tracker.finish({"exit_reason": "done"})
    content, run_id = stored(tmp_path), (tmp_path / "wandb.id").read_text().strip()
    assert b'"histogram"' in content and b"[2,0,5]" in content and b"[-1,0,1,2]" in content
    assert b"step 1: kl/ref_seq_mean 30 is above 20" in content and b"a warning" not in content
    assert b"987654321" not in b"".join(file.read_bytes() for file in tmp_path.glob("wandb/**/*.json"))
    for kind, file in (("report", "report.html"), ("model", "weights.safetensors")):
        # the files are named in place, not copied
        assert f"{kind}-{run_id}".encode() in content and str(tmp_path / "model").encode() in content
        assert file.encode() in content
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("summary", "sent"), [({"exit_reason": "done"}, True), ({"exit_reason": "signal"}, False)]
)
def test_only_an_exported_model_is_uploaded(tmp_path, monkeypatch, summary, sent):
    """A model of an earlier end of the run must not be uploaded after a signal."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.safetensors").write_bytes(b"0" * 1000)
    tracker, messages = WandbTracker(tmp_path, mode="offline", project="p", name="n", log_model=True), []
    monkeypatch.setattr(tracker, "send", messages.append)
    tracker.finish(summary)
    assert [set(message) for message in messages] == [{"artifact", "kind"}] * sent + [{"finish"}]


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id(tmp_path):
    run(tmp_path, "offline")
    first = (tmp_path / "wandb.id").read_text()
    run(tmp_path, "offline")
    assert (tmp_path / "wandb.id").read_text() == first
    assert len(list(tmp_path.glob(f"wandb/offline-run-*/run-{first.strip()}.wandb"))) >= 1


@pytest.mark.slow
def test_without_a_key_there_is_no_prompt_on_a_terminal(tmp_path):
    script = (
        "import sys; from ppo_ds.tracking.wandb import WandbTracker as W; t = "
        "W(sys.argv[1], mode='online', project='p', name='n')\n"
    )
    script += "t.start({}); t.log(1, {'a': 1.0}); t.finish({'exit_reason': 'done'}); print('went on')"
    mine, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
    )
    os.close(theirs)
    assert child.wait(LIMIT) == 0  # if wandb asked for input, the child would wait forever
    shown = os.read(mine, 65536).decode()
    os.close(mine)
    assert (
        "went on" in shown
        and shown.count("warning") == 1
        and "No API key" in shown
        and "continuing offline" in shown
    )
    assert stored(tmp_path)


@pytest.mark.slow
def test_an_unreachable_server_costs_a_bounded_time(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    spent = run(tmp_path, "online", start_timeout=3)
    assert sum(spent) < LIMIT
    # a second warning would say that the finish timed out
    assert capfd.readouterr().err.count("warning") == 1
    assert b"policy/loss" in stored(tmp_path)


@pytest.mark.slow
def test_a_server_that_accepts_and_never_replies(tmp_path, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        spent = run(tmp_path, "online", start_timeout=3)
    assert sum(spent) < LIMIT
    assert capfd.readouterr().err.count("warning") == 1
    assert b"policy/loss" in stored(tmp_path)


@pytest.fixture
def server(monkeypatch):
    """Starts a local wandb server, and sets a valid key."""
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "*")
        yield server


KEY, TOKEN = "0123456789abcdef" * 2 + "01234567", "hf_ThisIsNobodysTokenAtAll"


def online(run_dir, steps, **timeouts):
    """Starts a tracker and logs ``steps``."""
    tracker = WandbTracker(run_dir, mode="online", project="p", name="n", **timeouts)
    tracker.start({"run": {"seed": 1}})
    for step in steps:
        tracker.log(step, {"policy/loss": float(step)})
    return tracker


@pytest.mark.slow
def test_a_resumed_or_rolled_back_run_continues_the_same_wandb_run(tmp_path, server, capfd):
    online(tmp_path, [1, 2, 3, 4]).finish({"exit_reason": "error"})
    tracker = online(tmp_path, [3, 4])  # resumed from the checkpoint of step 2
    lines = [
        " ".join(process.cmdline())
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    ]
    tracker.finish({"exit_reason": "done"})
    ((run_id, rows),) = server.history.items()
    assert (tmp_path / "wandb.id").read_text().strip() == run_id
    assert [(row["_step"], row["step"], row["policy/loss"]) for row in rows] == [
        (0, 1, 1),
        (1, 2, 2),
        (2, 3, 3),
        (3, 4, 4),
        (4, 3, 3),
        (5, 4, 4),
    ]
    # The metric "step" is the x axis of all metrics: 1 is a metric's name, 2 a pattern, 5 the index of the
    # axis's entry, counted from 1, and 7 the values in the summary, of which an empty list is the last one.
    entries = server.configs[run_id]["_wandb"]["value"]["m"]
    named = {entry.get("1") or entry["2"]: entry for entry in entries}
    assert named.keys() == {"step", "*"}
    assert named["step"] == {"1": "step", "6": [3], "7": []}
    others = [entry for entry in entries if entry is not named["step"]]
    assert {entries[entry["5"] - 1]["1"] for entry in others} == {"step"}
    assert named["*"]["7"] == []
    assert capfd.readouterr().err == ""
    assert any("wandb_child" in line for line in lines) and any("wandb-core" in line for line in lines), lines
    written = (
        b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        + "".join(lines).encode()
    )
    for secret in (KEY, TOKEN):
        assert secret.encode() not in written and secret not in json.dumps(server.configs)


@pytest.mark.slow
def test_alerts_report_and_model_reach_the_server(tmp_path, server, capfd):
    server.artifacts = {}
    tracker = online(tmp_path, [1], log_report=True, log_model=True)
    tracker.event(1, "alarm", "kl/ref_seq_mean 30 is above 20")
    (tmp_path / "report.html").write_text("<html>")
    (tmp_path / "model" / "more").mkdir(parents=True)
    (tmp_path / "model" / "more" / "weights.safetensors").write_bytes(b"0" * 1000)
    tracker.finish({"exit_reason": "done"})
    ((run_id, rows),) = server.history.items()
    assert server.alerts == [("kl/ref_seq_mean 30 is above 20", "step 1: kl/ref_seq_mean 30 is above 20")]
    assert server.artifacts == {f"report-{run_id}": "report", f"model-{run_id}": "model"}
    assert server.files["report.html"] == b"<html>"
    assert server.files["more/weights.safetensors"] == b"0" * 1000
    assert [row["step"] for row in rows] == [1] and capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_run_that_was_deleted_on_the_server_becomes_a_new_one(tmp_path, server, capfd):
    (tmp_path / "wandb.id").write_text("mine1234\n")
    server.deleted.add("mine1234")
    # wandb repeats the refused request until the timeout
    online(tmp_path, [5], start_timeout=6).finish({"exit_reason": "done"})
    ((run_id, rows),) = server.history.items()
    assert (
        run_id != "mine1234"
        and (tmp_path / "wandb.id").read_text() == f"{run_id}\n"
        and [row["step"] for row in rows] == [5]
    )
    assert (
        capfd.readouterr().err
        == "warning: wandb run mine1234 was deleted on the server; continuing as a new run\n"
    )


@pytest.mark.slow
def test_a_server_that_is_gone_during_the_run(tmp_path, server, capfd):
    tracker = online(tmp_path, [1], finish_timeout=1)
    (child,) = (one for one in psutil.Process().children() if "wandb_child" in " ".join(one.cmdline()))
    server.close()
    os.killpg(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT
    while child.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel stops a process only when it is scheduled
    for step in (2, 3):
        tracker.log(step, {"policy/loss": 0.5})
        tracker.samples(step, [ROW])
    # No call has waited for the suspended child, and the tracker has not given wandb up.
    assert child.status() == psutil.STATUS_STOPPED and capfd.readouterr().err == ""
    os.killpg(child.pid, signal.SIGCONT)
    finish_after_the_loss(tracker, capfd)


@pytest.mark.slow
def test_a_server_that_is_silent_during_the_run(tmp_path, server, capfd):
    tracker = online(tmp_path, [1], finish_timeout=1)
    server.held.clear()
    tracker.samples(2, [ROW])
    connection = server.waiting.get(timeout=LIMIT)
    tracker.log(3, {"policy/loss": 0.5})
    tracker.samples(3, [ROW])
    # No call has waited for wandb, whose first request is still open and unanswered.
    with pytest.raises(BlockingIOError):
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    finish_after_the_loss(tracker, capfd)


def finish_after_the_loss(tracker, capfd):
    """Finishes a run after the loss of its server; this must take bounded time and give one warning."""
    begin = time.monotonic()
    tracker.finish({"exit_reason": "done"})
    assert time.monotonic() - begin < LIMIT
    err = capfd.readouterr().err
    assert (
        err.count("warning") == 1
        and "not all data was sent" in err
        and "metrics.jsonl and samples/ have all of it" in err
    )


@pytest.mark.slow
def test_a_table_that_the_server_refuses_affects_nothing_else(tmp_path, server, capfd):
    tracker = online(tmp_path, [1])
    tracker.samples(1, [ROW])
    tracker.log(2, {"policy/loss": 2.0})
    tracker.finish({"exit_reason": "done"})
    assert server.tables == 1 and [row["step"] for row in next(iter(server.history.values()))] == [1, 2]
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "did not accept 1 message(s)" in err


def test_without_a_key_or_a_terminal(tmp_path, capfd):
    run(tmp_path, "online")
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "No API key" in err and "continuing offline" in err


def test_wandb_that_cannot_be_imported(tmp_path, monkeypatch, capfd):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('built for another Python')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    run(folder, "online")
    err = capfd.readouterr().err
    assert (
        err.count("warning") == 2
        and err.count("ImportError: built for another Python") == 2
        and "continuing without it" in err
    )


@pytest.mark.parametrize("name", ["wandb.id", "wandb.log"])
def test_files_that_cannot_be_written_leave_a_run_without_it(tmp_path, capfd, name):
    (tmp_path / name).mkdir()
    run(tmp_path, "offline")
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "Is a directory" in err and "continuing without it" in err


@pytest.mark.parametrize("content", ["", "\n", "../../elsewhere", "a b"])
def test_an_invalid_id_is_not_used(tmp_path, content):
    (tmp_path / "wandb.id").write_text(content)
    assert read_run_id(tmp_path / "wandb.id") is None


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    """Simulates a full disk: no file may grow beyond 4 KB."""
    script = (
        "import resource, sys; from ppo_ds.tracking.wandb import WandbTracker as W; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    )
    script += "t = W(sys.argv[1], mode='offline', project='p', name='n', finish_timeout=3); t.start({})\n"
    script += "for step in range(200): t.log(step, {f'a/{i}': 0.123 * i * step for i in range(50)})\n"
    script += "t.finish({'exit_reason': 'done'}); print('went on')"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    shown = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert "went on" in shown.stdout and shown.returncode == 0, shown
    assert shown.stderr.count("warning") == len(shown.stderr.splitlines()) <= 2, shown.stderr
    assert all(file.stat().st_size <= 4096 for file in tmp_path.rglob("*") if file.is_file())


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
    trackers = Trackers(
        [WandbTracker(tmp_path, mode="offline", project="p", name="n \ud83d/..")], max_samples=1
    )
    trackers.start(odd)
    trackers.log(1, {"fine": 1.0, "lost": float("nan"), "endless": float("-inf"), "../../up": 2.0, "": 3.0})
    trackers.samples(1, [])
    trackers.samples(1, [{"prompt": "\ud800\x00\x1b[31m", "score": float("nan"), "odd": {"a": {1}}}, ROW])
    trackers.samples(2, [{"prompt": 7, "response": None}])  # other columns and types
    trackers.log(2, {"last/words": 1.0})
    trackers.finish({"exit_reason": "done", "loss": float("nan")})
    assert b"last/words" in stored(tmp_path) and b"../../up" in stored(tmp_path)
    assert capfd.readouterr().err == ""
    assert {entry.name for entry in tmp_path.iterdir()} - {"home"} == {"wandb", "wandb.id", "wandb.log"}


def test_no_wandb_at_all_leaves_a_run_without_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("ppo_ds.tracking.wandb.CHILD", tmp_path / "missing.py")
    run(tmp_path, "online", start_timeout=3)
    err = capfd.readouterr().err
    assert err.count("warning") == 2 and "continuing offline" in err and "continuing without it" in err
    assert not (tmp_path / "wandb.id").exists()


def start(tmp_path, **timeouts):
    tracker = WandbTracker(tmp_path, mode="offline", project="p", name="n", **timeouts)
    tracker.start({})
    return tracker, tracker._child._process


@pytest.mark.slow
def test_wandb_dies_during_the_run(tmp_path, capfd):
    tracker, process = start(tmp_path)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for step in range(3):
        tracker.log(step, {"a": 1.0})
    tracker.finish({"exit_reason": "done"})
    assert capfd.readouterr().err.count("warning") == 1


@pytest.mark.slow
def test_wandb_hangs_during_the_run(tmp_path, capfd, monkeypatch):
    tracker, process = start(tmp_path, finish_timeout=1)
    os.killpg(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    for step in range(3000):
        tracker.log(step, {f"a/{i}": 1.0 for i in range(20)})  # far more than the capacity of a pipe
    tracker.finish({"exit_reason": "done"})
    assert time.monotonic() - begin < LIMIT
    assert process.poll() is not None
    err = capfd.readouterr().err
    assert err.count("warning") == 1 and "wandb sync" in err


@pytest.mark.slow
def test_an_endless_backlog_ends_wandb(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("ppo_ds.tracking.child.MAX_PENDING", 5)
    tracker, process = start(tmp_path)
    os.killpg(process.pid, signal.SIGSTOP)
    for step in range(50):
        tracker.log(step, {"a": "x" * 50_000})
    assert process.poll() is not None and capfd.readouterr().err.count("warning") == 1


@pytest.mark.slow
def test_signals_to_the_process_group_do_not_lose_the_last_messages(tmp_path):
    tracker, process = start(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    tracker.log(1, {"last/words": 1.0})
    tracker.finish({"exit_reason": "stopped"})
    assert b"last/words" in stored(tmp_path)


@pytest.mark.slow
def test_a_killed_trainer_leaves_a_closed_run_and_no_process(tmp_path):
    script = (
        "import os, sys, time; from ppo_ds.tracking.wandb import WandbTracker as W; t "
        "= W(sys.argv[1], mode='offline', project='p', name='n')\n"
    )
    script += "t.start({}); t.log(1, {'last/words': 1.0})\n"
    script += (
        "t._child._outbox.join()  # written to the pipe, from which the child reads it "
        "after the trainer's death\n"
    )
    script += "print(t._child._process.pid, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
    )
    group = int(killed.stdout.split()[-1])
    deadline = time.monotonic() + LIMIT
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(group)
    assert b"last/words" in stored(tmp_path)


def alive(group):
    """Returns whether a process of the group is running; zombies do not count."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False


def test_disabled_never_imports_wandb():
    script = (
        "import sys, ppo_ds.tracking.tracker, ppo_ds.tracking.console, "
        "ppo_ds.tracking.jsonl, ppo_ds.tracking.wandb; print('wandb' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shown.stdout.strip() == "False"


class Table:
    """Stands in for a wandb table and keeps its rows."""

    def __init__(self, columns, **options):
        self.columns, self.rows = columns, []

    def add_data(self, *cells):
        self.rows.append(cells)


def test_samples_are_rows_of_one_table_per_split_at_their_step(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=Table))
    logged = []
    client = WandbClient(SimpleNamespace(log=logged.append))
    tables = client.tables
    for step, split in ((1, "train"), (1, "eval"), (2, "train")):
        client.samples(step, [{"prompt": "p", "score": 0.5, "components": {"a": 1}}], split)
    assert [entry["step"] for entry in logged] == [1, 1, 2]
    assert [sorted(entry) for entry in logged] == [
        ["samples/train", "step"],
        ["samples/eval", "step"],
        ["samples/train", "step"],
    ]
    assert tables["train"].columns == ["step", "prompt", "score", "components"]
    assert tables["train"].rows == [(1, "p", 0.5, '{"a": 1}'), (2, "p", 0.5, '{"a": 1}')]
    assert tables["eval"].rows == [(1, "p", 0.5, '{"a": 1}')]
