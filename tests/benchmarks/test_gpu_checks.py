"""Tests the checks for a GPU: time limits, evaluation of results, and that their commands run on the CPU."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks import gpu_checks
from benchmarks.gpu_checks import CHECKS, Check, Result, Run
from tests.support.environment import run_python


def result(*steps, code=0, log=""):
    return Result(code, 1.0, log, list(steps))


def test_blocks_take_at_most_25_minutes_and_checks_less_than_10():
    for block in ("correctness", "speed"):
        assert sum(check.minutes for check in CHECKS.values() if check.block == block) <= 25
    assert {check.block for check in CHECKS.values()} == {"correctness", "speed"}
    assert max(check.minutes for check in CHECKS.values()) < 10


def test_first_gradients_may_differ_by_five_percent():
    near = {"a": result({"policy/grad_norm": 2.0}), "b": result({"policy/grad_norm": 2.09})}
    far = near | {"c": result({"policy/grad_norm": 2.11})}
    assert gpu_checks.first_gradients(near)[0] and not gpu_checks.first_gradients(far)[0]


def test_the_first_step_is_left_out_of_a_ratio():
    steps = [[9.0, 2.0, 3.0, 70.0], [1.0, 6.0, 5.0, 80.0]]  # medians without the first: 3 and 6
    results = {
        name: result(*({"time/step": seconds} for seconds in times))
        for name, times in zip(("default", "cudnn"), steps, strict=True)
    }
    passed, shown = gpu_checks.ratio_of("time/step", 1.0, 10.0)(results)
    assert passed and shown == "time/step = 3 (default); divided by it: cudnn 2"
    assert not gpu_checks.ratio_of("time/step", 2.5, 10.0)(results)[0]


@pytest.mark.parametrize(
    "gap, log, passed",
    [(1e-3, "", True), (1e-2, "", False), (1e-3, "decoding continues without CUDA graphs, slower: x", False)],
)
def test_decoding(gap, log, passed):
    step = {"parity/logp_abs_diff_mean": gap, "time/generate": 2.0}
    results = {
        "static": result(step, log=log),
        "hf": result(step | {"time/generate": 5.0}),
        "narrow": result(step | {"time/generate": 3.0}),
    }
    found, shown = gpu_checks.decoding_agrees(results)
    assert found == passed and shown.endswith("divided by static: hf 2.5, narrow 1.5")


def test_a_resumed_run_may_differ_in_times_only():
    straight = [{"step": 1, "policy/loss": 0.5, "time/step": 1.0}, {"step": 2, "policy/loss": 0.25}]
    resumed = [
        {"step": 1, "policy/loss": 0.5, "time/step": 3.0, "time": 7.0},
        {"step": 2, "policy/loss": 0.25},
    ]
    results = {"straight": result(*straight), "resumed": result(*resumed)}
    assert gpu_checks.same_after_resume(results) == (True, "2 steps: all metrics are equal")
    resumed[1]["policy/loss"] = 0.25000001
    assert gpu_checks.same_after_resume(results) == (False, "2 steps: different: policy/loss")
    with pytest.raises(ValueError):  # a step is missing
        gpu_checks.same_after_resume(results | {"resumed": result(resumed[0])})


@pytest.mark.parametrize("estimate, passed", [(48.0, True), (65.0, True), (47.0, False), (67.0, False)])
@pytest.mark.parametrize(
    "line", ["fits       {} GiB of 75.0 GiB available", "too much   {} GiB in update, of 40.0 GiB"]
)
def test_the_estimate_may_be_a_third_too_high_and_a_twentieth_too_low(estimate, passed, line):
    results = {
        "expandable": result({"mem/reserved_peak_gb": 50.0}),
        "fixed": result({"mem/reserved_peak_gb": 55.0}),
        "doctor": result(log="work       1 TFLOP\n" + line.format(estimate)),
    }
    assert gpu_checks.memory_estimate(results)[0] == passed


def test_more_steps_may_not_synchronize_the_device_more_often():
    line = "table\nsynchronizations of the device: {}\n"
    few, many = (result(log=line.format(found)) for found in ("2 {'a.py': 2}", "4 {'timer.py': 4}"))
    assert gpu_checks.waits({"steps1": few, "steps3": few})[0]
    passed, shown = gpu_checks.waits({"steps1": few, "steps3": many})
    assert not passed and shown.startswith("one step: 2; three steps: 4 ") and "timer.py" in shown
    with pytest.raises(ValueError):  # nothing was counted
        gpu_checks.waits({"steps1": few, "steps3": result(log="killed")})


def test_growth_of_memory_after_the_third_step():
    flat = [{"mem/reserved_peak_gb": peak} for peak in (3.0, 4.0, 5.0, 5.0, 5.1)]
    grown = [*flat, {"mem/reserved_peak_gb": 5.2}]
    assert gpu_checks.no_growth({"steps": result(*flat)})[0]
    assert not gpu_checks.no_growth({"steps": result(*grown)})[0]


@pytest.mark.parametrize(
    "log, passed",
    [
        ("error: out of memory: memory.train_tokens=8 is halved", True),
        ("Traceback (most recent call last):\nmemory.train_tokens", False),
        ("killed", False),
    ],
)
def test_out_of_memory(log, passed):
    assert gpu_checks.out_of_memory({"update": result(code=1, log=log)})[0] == passed


def test_a_killed_or_unreadable_run_fails_its_check(tmp_path, capsys):
    sleeps = Run("sleeps", ["-c", "import time; time.sleep(600)"], minutes=0.01)
    crashes = Run("crashes", ["-c", "raise SystemExit('no metrics')"])
    checks = {
        "slow": Check("speed", "?", [sleeps], gpu_checks.all_ran),
        "code": Check("speed", "?", [crashes], gpu_checks.all_ran),
        "unread": Check("speed", "?", [replace(crashes, codes=(1,))], gpu_checks.first_gradients),
    }
    for name, check in checks.items():
        assert not gpu_checks.perform(name, check, tmp_path, on_cpu=False)
    printed = capsys.readouterr().out
    assert "FAILED  slow: unexpected exit code of sleeps" in printed and "exit codes: sleeps None" in printed
    assert "FAILED  code: unexpected exit code of crashes" in printed and "exit codes: crashes 1" in printed
    assert "FAILED  unread: the results could not be read (IndexError" in printed
    assert (tmp_path / "unread_crashes.log").read_text() == "no metrics\n"
    recorded = json.loads((tmp_path / "results.json").read_text())
    assert [entry["passed"] for entry in recorded.values()] == [False] * 3
    row = recorded["code"]["tested"]
    assert row.startswith("| `code` | CPU, torch ") and row.endswith(
        "| FAILED: unexpected exit code of crashes (None: killed at the time limit) |"
    )


@pytest.mark.parametrize(("given", "seen"), [("2,5", "2"), (None, "0")])
def test_commands_see_one_gpu(tmp_path, monkeypatch, given, seen):
    """The doctor counts all visible GPUs, and the runs that it is compared with have one rank."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    run = Run("shows", ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"])
    assert gpu_checks.execute(run, tmp_path, on_cpu=False).log == f"{seen}\n"


@pytest.mark.parametrize(("seconds", "passed"), [(0.98, True), (0.96, False)])
def test_attention_without_cudnn_may_be_as_fast_up_to_noise(seconds, passed):
    steps = {"default": result({"time/step": 1.0}), "cudnn": result({"time/step": seconds})}
    assert CHECKS["attention"].judge(steps)[0] == passed


def test_without_a_gpu_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_checks.main(["gradients", "--out", str(tmp_path / "out")]) == 2
    assert (
        capsys.readouterr().err.startswith("error: torch finds no GPU: ") and not (tmp_path / "out").exists()
    )


@pytest.mark.slow
def test_checks_run_on_the_cpu(tmp_path):
    names = ["waits", "resume", "out_of_memory"]
    done = run_python("benchmarks/gpu_checks.py", *names, "--cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed  resume: 4 steps: all metrics are equal\n" in done.stdout
    assert "passed  waits: one step: " in done.stdout
    line = r"passed  out_of_memory: error: rank 0 is out of memory in .* with memory.train_tokens=1000000: "
    assert re.search(line, done.stdout)
