"""Tests faults of two ranks under the real launchers: kills, a suspended rank, full disks, a hung dashboard.

After each fault, the same command continues the run, and its end is compared with an undisturbed run bit by
bit. The random kills are repeated with

    PPO_DS_KILLS=30             kills in total
    PPO_DS_KILL_SEED=N          the seed of the random choices; by default different each time
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.engine.checkpoint.checkpoints import damage_of
from ppo_ds.tracking.jsonl import read_events, read_metrics
from tests.faults import pipeline_lab
from tests.faults.launched import Launched
from tests.faults.test_fault_checkpoints import (
    Lab,
    assert_equal_ends,
    identity,
    metrics,
    names,
    resumed_after,
    steps,
    whole,
)
from tests.faults.test_fault_stopping import latest, marked, reason
from tests.faults.test_random_kills import COUNTED, newest_checkpoint
from tests.integration.launching import command
from tests.tracking.wandb_server import wandb_server

STEPS = 6
KILLS = int(os.environ.get("PPO_DS_KILLS", "30"))
SEED = int(os.environ.get("PPO_DS_KILL_SEED", random.SystemRandom().randrange(10**6)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("launched"), None)  # no ranks are forked here


def arguments(lab: Lab, run: str, *more: str, number: int = STEPS) -> list[str]:
    return whole(lab, run, f"run.steps={number}", *more)


def finished(lab: Lab, line: list[str], **more: str) -> str:
    """Runs a command to its end, which must be a good one, and returns its output."""
    with Launched(line, lab.root / "log", **more) as run:
        assert run.wait() == 0, run.text
        return run.text


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> Path:
    finished(lab, command("torchrun", *arguments(lab, "undisturbed")))
    return lab.root / "undisturbed"


def made(run: Path) -> int:
    """Returns the number of the last step in metrics.jsonl, or 0."""
    return max([0, *steps(run)])


# -- a rank that is suspended ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "rank"),
    [("deepspeed", 1), pytest.param("deepspeed", 0, marks=pytest.mark.nightly), ("torchrun", 0)],
)
def test_a_suspended_rank_is_named_and_ends_the_run(
    lab: Lab, undisturbed: Path, launcher: str, rank: int
) -> None:
    name = f"suspended_{launcher}_{rank}"
    run_dir = lab.root / name
    line = command(launcher, *arguments(lab, name, "run.timeout_minutes=0.2"))
    with Launched(line, lab.root / "log") as run:
        run.wait_for(lambda: made(run_dir) >= 2, "no second step")
        os.kill(run.rank(rank), signal.SIGSTOP)
        code = run.wait()
        text = run.text
    assert code == 1, text
    assert f"stuck (no progress on rank {rank}, which is suspended, for 12 s" in text, text
    assert "Traceback" not in text.partition("failed (exitcode")[0], text  # of torchrun
    assert resumed_after(finished(lab, line)) > 0
    assert_equal_ends(run_dir, undisturbed, STEPS)


# -- a damaged checkpoint --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_by_the_next_start(lab: Lab, undisturbed: Path) -> None:
    run_dir, line = lab.root / "damaged", command("deepspeed", *arguments(lab, "damaged"))
    with Launched(line, lab.root / "log", PPO_DS_FAULT="kill@checkpoint.before:at=5") as run:
        assert run.wait() != 0 and latest(run_dir) == 4, run.text
    weights = run_dir / "checkpoints" / "step_000004" / "actor" / "shard-00000.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    text = finished(lab, line)
    assert "step_000004 is damaged and skipped: actor/shard-00000.safetensors has changed" in text
    assert resumed_after(text) == 3, text
    assert_equal_ends(run_dir, undisturbed, STEPS)


# -- full disks ------------------------------------------------------------------------------------

FULL_SHM = (
    "mount -t tmpfs -o size=64k,nr_inodes=3 tmpfs /dev/shm && : >/dev/shm/a && "
    '{ cat /dev/zero >/dev/shm/b 2>/dev/null; exec "$@"; }'
)


@contextmanager
def small_disk(folder: Path, size: str = "32m") -> Iterator[None]:
    """Mounts a file system of this size on the new ``folder``; skips the test where this is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    )
    if done.returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path, leave: int) -> None:
    """Allocates all but ``leave`` bytes of the file system of ``folder``."""
    status = os.statvfs(folder)
    size = status.f_bavail * status.f_frsize - leave
    if size > 0:
        with (folder / f"ballast_{time.monotonic_ns()}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)


@pytest.mark.slow
def test_a_full_shared_memory_does_not_matter(lab: Lab, undisturbed: Path) -> None:
    if subprocess.run(["unshare", "-m", "sh", "-c", FULL_SHM, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    shell = ["unshare", "-m", "sh", "-c", FULL_SHM, "sh"]
    finished(lab, [*shell, *command("deepspeed", *arguments(lab, "shm"))])
    assert_equal_ends(lab.root / "shm", undisturbed, STEPS)


SLOW_UPDATE = "slow@update:times=0:seconds=1"
SLOW_SAVE = "slow@checkpoint.after_actor:at=4:seconds=4"
SLOW_END = "slow@checkpoint.before_prune:at=6:seconds=4"
# what cannot be written; the fault that gives time to fill the disk, the bytes that stay free (None: those
# of the exports), the last intact checkpoint, and what the line says
FULL = {
    "checkpoint": (SLOW_SAVE, 0, 3, "step_000004 was not written, older checkpoints are unchanged"),
    "metrics": (SLOW_UPDATE, 0, 3, "run.dir={run_dir}: "),
    "export": (SLOW_END, 0, 6, "run.dir={run_dir}: "),
    "report": (SLOW_END, None, 6, "run.dir={run_dir}: "),
}


def due(what: str, run_dir: Path) -> bool:
    """Returns whether the disk is to be filled now."""
    checkpoints = run_dir / "checkpoints"
    if what == "checkpoint":
        return any(checkpoints.glob(".tmp_step_000004_*"))
    if what == "metrics":  # old checkpoints, which would free space, have been deleted
        return checkpoints.exists() and names(run_dir) == ["2", "3", "latest -> 3"]
    return (checkpoints / "latest").exists() and latest(run_dir) == FULL[what][2]


@pytest.mark.nightly
@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_ends_the_run_with_one_line(lab: Lab, undisturbed: Path, what: str) -> None:
    fault, leave, kept, said = FULL[what]
    disk = lab.root / f"disk_{what}"
    run_dir, line = disk / "run", command("deepspeed", *arguments(lab, f"{disk.name}/run"))
    if leave is None:
        exports = [
            file for name in ("model", "model_ema", "critic") for file in (undisturbed / name).iterdir()
        ]
        leave = sum(-(-file.stat().st_size // 4096) * 4096 for file in exports) + 65536
    with small_disk(disk):
        with Launched(line, lab.root / "log", PPO_DS_FAULT=fault) as run:
            run.wait_for(lambda: due(what, run_dir), "the disk was not filled")
            fill(disk, leave)
            code, text = run.wait(), run.text
        told = [one for one in text.splitlines() if "No space left" in one or "bytes" in one]
        assert code == 1 and "Traceback" not in text, text
        assert sum(said.format(run_dir=run_dir) in one for one in told) == 1, text
        assert what != "report" or "report.html was not written: OSError: [Errno 28]" in text, text
        assert latest(run_dir) == kept
        assert not damage_of(run_dir / "checkpoints" / f"step_{kept:06d}")
        for file in disk.glob("ballast_*"):
            file.unlink()
        text = finished(lab, line)
        assert f"holds all {STEPS} steps" in text if kept == STEPS else resumed_after(text) == kept
        assert_equal_ends(run_dir, undisturbed, STEPS)
        assert (run_dir / "report.html").stat().st_size > 10_000
        assert (run_dir / "curves.png").exists() and reason(run_dir) == "done"


# -- a dashboard that hangs ------------------------------------------------------------------------

KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["the server", "the process"])
def test_a_dashboard_that_hangs_at_the_end_delays_it_for_a_limited_time(
    lab: Lab, undisturbed: Path, what: str
) -> None:
    run_dir, hung = lab.root / f"dashboard {what}", threading.Event()
    with wandb_server() as server:
        answer = server.answer

        def answer_or_hang(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if hung.is_set():
                time.sleep(1e6)
            return answer(path, body)

        server.answer = answer_or_hang
        login = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "NO_PROXY": "*", "HOME": str(lab.root)}
        line = command("deepspeed", *arguments(lab, run_dir.name, "tracker=wandb"))
        with Launched(line, lab.root / "log", **login) as run:
            run.wait_for(lambda: made(run_dir) >= 2, "no second step")
            assert server.history, run.text
            stopped = [pid for pid in run.pids() if "wandb" in Path(f"/proc/{pid}/comm").read_text()]
            assert stopped
            if what == "the server":
                hung.set()
            for pid in stopped if what == "the process" else []:
                os.kill(pid, signal.SIGSTOP)
            code = run.process.wait(300)
            for pid in stopped if what == "the process" else []:
                os.kill(pid, signal.SIGCONT)
            run.wait()  # its process ends too
            text = run.text
    hung_line = "warning: wandb has not ended its finish within 60 s; continuing without it"
    assert code == 0 and text.count(hung_line) == 1 and "Traceback" not in text, text
    assert reason(run_dir) == "done" and (run_dir / "report.html").exists()
    assert_equal_ends(run_dir, undisturbed, STEPS)


# -- a clock that jumps ----------------------------------------------------------------------------

CLOCK = """
import os, time

real = time.time
time.time = lambda: real() - (3600 if os.path.exists(os.environ["JUMPED"]) else 0)
"""


@pytest.mark.nightly
def test_a_clock_that_jumps_back_by_an_hour_does_not_matter(lab: Lab, undisturbed: Path) -> None:
    """Sets the clock back during the first start, whose ranks are killed later; so their files are new."""
    folder = lab.root / "clock"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLOCK)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    surroundings = {"PYTHONPATH": path, "JUMPED": str(folder / "jumped")}
    run_dir, line = folder / "run", command("deepspeed", *arguments(lab, "clock/run"))
    fault = "kill@checkpoint.before:at=5 slow@update:times=0:seconds=0.3"
    with Launched(line, lab.root / "log", PPO_DS_FAULT=fault, **surroundings) as run:
        run.wait_for(lambda: made(run_dir) >= 2, "no second step")
        (folder / "jumped").touch()
        assert run.wait() != 0 and (run_dir / "run.lock").exists(), run.text
    text = finished(lab, line, **surroundings)
    assert resumed_after(text) == 4 and "waiting up to" not in text and "-" not in clock_of(text), text
    assert_equal_ends(run_dir, undisturbed, STEPS)
    lines = read_metrics(run_dir / "metrics.jsonl")
    durations = [value for one in lines for name, value in one.items() if name.startswith("time/")]
    clocks = [one["time"] for one in lines]
    assert min(durations) >= 0 and clocks == sorted(clocks) and clocks[0] >= 0
    times = [event["time"] for event in read_events(run_dir / "events.jsonl")]
    assert min(times) >= 0 and max(times) < 3000
    assert 0 <= json.loads((run_dir / "summary.json").read_text())["wall_s"] < 3000


def clock_of(text: str) -> str:
    """Returns what the last line of a run says on its duration."""
    return text.partition("done after ")[2].split(" s")[0]


# -- a pipeline ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_pipeline_that_is_killed_in_every_stage_goes_on(tmp_path: Path, monkeypatch) -> None:
    pipeline_lab.make(tmp_path)
    whole_log = tmp_path / "whole.log"
    assert pipeline_lab.run(tmp_path, "whole", "ranks=2") == 0, whole_log.read_text()
    monkeypatch.setenv("MARK", mark := f"pipeline_{random.randrange(10**12)}")
    folder, log, done = tmp_path / "outputs" / "killed", tmp_path / "killed.log", {}
    for stage in (*pipeline_lab.STAGES, "evaluation", None):
        log.unlink(missing_ok=True)
        process = pipeline_lab.start(tmp_path, "killed", "ranks=2")
        try:
            until = time.monotonic() + pipeline_lab.LIMIT
            while stage is not None and not reached(folder, stage, log.read_text()):
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.02)
            code = process.wait(pipeline_lab.LIMIT) if stage is None else None
        finally:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()
        assert code in (0, None), log.read_text()
        assert log.read_text().count(": is done") == len(done), log.read_text()
        for name, content in done.items():
            assert files(folder / name) == content, name
        done = {name: files(folder / name) for name in pipeline_lab.STAGES if is_done(folder / name)}
    for name in pipeline_lab.STAGES:
        weights = [
            tmp_path / "outputs" / run / name / "model" / "model.safetensors" for run in ("whole", "killed")
        ]
        assert weights[0].read_bytes() == weights[1].read_bytes(), name
        assert metrics(folder / name) == metrics(tmp_path / "outputs" / "whole" / name)
    results = [
        json.loads((tmp_path / "outputs" / run / "evaluation.json").read_text())
        for run in ("whole", "killed")
    ]
    assert results[0]["rewards"] == results[1]["rewards"]


def is_done(run_dir: Path) -> bool:
    return (run_dir / "summary.json").exists() and reason(run_dir) == "done"


def reached(folder: Path, stage: str, log: str) -> bool:
    """Returns whether a stage has made its third step, or the evaluation has loaded its first model."""
    if stage == "evaluation":
        return "evaluation (4 of 4)" in log
    return made(folder / stage) >= 3


def files(run_dir: Path) -> dict[str, int]:
    """Returns the times of change of all files of a finished stage."""
    return {str(file): file.stat().st_mtime_ns for file in run_dir.rglob("*") if file.is_file()}


# -- random kills ----------------------------------------------------------------------------------

MANY = 12  # steps of a run
TARGETS = ("the launcher", "the child launcher", "rank 0", "rank 1", "all processes")


def target(run: Launched, choice: str) -> list[int]:
    """Returns the process ids of a target; the launcher if the target has not started yet."""
    if choice == "all processes":
        return run.pids()
    if choice == "the child launcher":
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        return [int(pid) for pid in children[:1]] or [run.process.pid]
    rank = run.rank(int(choice[-1])) if choice.startswith("rank") else None
    return [rank or run.process.pid]


def phase(run: Launched, run_dir: Path, record: int | None) -> str:
    """Describes what a run is doing; ``record`` identifies the metrics file before its start."""
    if run.rank(0) is None and run.rank(1) is None:
        return "before the ranks"
    if identity(run_dir) == record:
        return "start-up"
    if any((run_dir / "checkpoints").glob(".tmp_step_*")):
        return "save"
    return "end" if made(run_dir) == MANY else "step"


@pytest.mark.nightly
def test_randomly_killed_launches_end_like_an_undisturbed_one(
    lab: Lab, record_property: Callable[[str, object], None]
) -> None:
    print(f"\nPPO_DS_KILL_SEED={SEED}")
    choices, counts = random.Random(SEED), {name: Counter() for name in ("signal", "target", "phase")}
    whole_run, kills, runs, repeated, starts = lab.root / "many", 0, 0, 0, 0
    settings = ("checkpoint.every=2", "run.timeout_minutes=1")
    line = command("deepspeed", *arguments(lab, "many", *settings, number=MANY))
    began = time.monotonic()
    with Launched(line, lab.root / "log") as run:
        run.wait_for(lambda: made(whole_run) >= 1, "no first step")
        startup, first = time.monotonic() - began, time.monotonic()
        assert run.wait() == 0, run.text
    # estimates in seconds of the time to the first step, and from there to the end; renewed on a busy machine
    duration = time.monotonic() - first
    began, ended = time.monotonic(), True
    while kills < KILLS or not ended:
        if ended:
            run_dir = lab.root / f"killed_{runs}"
            launcher = ("deepspeed", "torchrun")[runs % 2]
            line = command(launcher, *arguments(lab, run_dir.name, *settings, number=MANY))
        starts += 1
        record, early, goes_on = identity(run_dir), choices.random() < 0.4, kills == KILLS
        share, number = choices.random(), choices.choice([signal.SIGKILL, signal.SIGTERM])
        aim = choices.choice([name for name in TARGETS if launcher == "deepspeed" or "child" not in name])
        with Launched(line, lab.root / "log") as run:
            start = time.monotonic()
            while not early and identity(run_dir) == record and run.process.poll() is None:
                time.sleep(0.01)
            if not early:
                startup, start = time.monotonic() - start, time.monotonic()
            delay = share * (startup if early else duration)
            while (goes_on or time.monotonic() < start + delay) and run.process.poll() is None:
                time.sleep(0.01)
            known = f"start {starts}: {launcher}, {number.name} to {aim} after {delay:.1f} s"
            ended = run.process.poll() is not None
            if ended and not early:
                duration = time.monotonic() - start
            if not ended:
                at = phase(run, run_dir, record)
                print(f"{known}, {at}", flush=True)
                for pid in target(run, aim):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            code = run.wait()
            text = f"seed {SEED}, {known}: {code}\n{run.text}"
        if ended:
            assert code == 0, text
            assert_equal_ends(run_dir, whole_run, MANY)
            runs += 1
            shutil.rmtree(run_dir)
            continue
        kills += 1
        for name, value in (("signal", number.name), ("target", f"{launcher}: {aim}"), ("phase", at)):
            counts[name][value] += 1
        assert code != 2, text
        found = metrics(run_dir)
        assert found[:-1] == metrics(whole_run)[: len(found[:-1])], text
        repeated += max(0, made(run_dir) - newest_checkpoint(run_dir))
    figures = {
        "seed": SEED, "kills": kills, "starts": starts, "runs compared": runs, "steps of each run": MANY,
        "repeated steps": repeated, "seconds": round(time.monotonic() - began),
        **{name: dict(found.most_common()) for name, found in counts.items()},
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    record_property("launchers", ", ".join(f"{name} {figures[name]}" for name in ("seed", *COUNTED)))
