"""Tests the checks for GPUs: time limits, judges, skipped checks, and all of them on the CPU with faults."""

import json
import math
import re
from dataclasses import replace

import pytest

from benchmarks import gpu_checks
from benchmarks.checks import judges
from benchmarks.checks.runs import Check, Fault, Result, Run, execute, varied
from benchmarks.gpu_checks import CHECKS
from tests.support.environment import run_python

MINUTES = {"correctness": 25, "speed": 25, "vllm": 14, "vllm_two": 6, "two": 40, "eight": 40}


def result(*steps, code=0, log="", seconds=1.0):
    return Result(code, seconds, log, list(steps))


def test_time_limits_of_blocks():
    blocks = {check.block for check in CHECKS.values()}
    assert blocks == MINUTES.keys()
    for block in blocks:
        assert sum(check.minutes for check in CHECKS.values() if check.block == block) <= MINUTES[block]
    assert {name for name, check in CHECKS.items() if check.minutes >= 12} == {"seven_b"}


def test_numbers_of_gpus():
    needed = {block: {c.gpus for c in CHECKS.values() if c.block == block} for block in MINUTES}
    assert needed.pop("eight") == {8} and needed.pop("two") == needed.pop("vllm_two") == {2}
    assert all(numbers == {1} for numbers in needed.values())


@pytest.mark.parametrize("tiny", [True, False])
def test_every_check_has_faults_in_its_own_runs(tiny):
    for name, check in gpu_checks.all_checks(tiny).items():
        runs = {run.name: run for run in check.runs}
        assert len(runs) == len(check.runs) and check.faults, name
        for fault in check.faults:
            for run in fault.runs:
                changed = (list(run.command), run.environment) != (
                    list(runs[run.name].command),
                    runs[run.name].environment,
                )
                assert changed or len(fault.runs) > 1, (name, fault.name)


def test_the_list_shows_every_check(capsys):
    assert gpu_checks.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "\neight: 8 GPU(s), at most " in printed
    assert re.findall(r"^  (\w+) +[\d.]+ min  \w", printed, re.M) == sorted(
        CHECKS, key=lambda name: list(MINUTES).index(CHECKS[name].block)
    )


def test_first_gradients_may_differ_by_five_percent():
    near = {"a": result({"policy/grad_norm": 2.0}), "b": result({"policy/grad_norm": 2.09})}
    far = near | {"c": result({"policy/grad_norm": 2.11})}
    assert judges.first_gradients(near)[0] and not judges.first_gradients(far)[0]
    assert not judges.first_gradients(near | {"c": result({"policy/grad_norm": math.nan})})[0]


def test_gradients_of_both_models_are_compared_in_each_step():
    step = {"policy/grad_norm": 2.0, "value/grad_norm": 4.0}
    judge = judges.same_gradients(0.01)

    def passed(**changed):
        last = step | {name.replace("_", "/", 1): value for name, value in changed.items()}
        return judge({"one": result(step, step), "two": result(step, last)})[0]

    assert passed(policy_grad_norm=2.019) and not passed(policy_grad_norm=2.021)
    assert passed(value_grad_norm=3.961) and not passed(value_grad_norm=3.959)
    assert not passed(value_grad_norm=math.nan)
    with pytest.raises(ValueError):  # a step is missing
        judge({"one": result(step, step), "two": result(step)})


def test_a_run_with_fewer_ranks_has_the_last_steps():
    steps = [{"policy/grad_norm": norm, "value/grad_norm": norm} for norm in (9.0, 7.0, 3.0, 2.0)]
    judge = judges.resumed_gradients(0.01)
    assert judge({"prepare": result(), "straight": result(*steps), "fewer": result(*steps[2:])})[0]
    assert not judge({"straight": result(*steps), "fewer": result(*steps[:2])})[0]


def test_the_first_step_is_left_out_of_a_ratio():
    steps = [[9.0, 2.0, 3.0, 70.0], [1.0, 6.0, 5.0, 80.0]]  # medians without the first: 3 and 6
    results = {
        name: result(*({"time/step": seconds} for seconds in times))
        for name, times in zip(("default", "cudnn"), steps, strict=True)
    }
    passed, shown = judges.ratio_of("time/step", 1.0, 10.0)(results)
    assert passed and shown == "time/step = 3 (default); divided by it: cudnn 2 (from 1 to 10)"
    assert not judges.ratio_of("time/step", 2.5, 10.0)(results)[0]


@pytest.mark.parametrize(
    "gap, norm, passed",
    [(0.019, 1.0, True), (0.021, 1.0, False), (0.0, math.nan, False), (math.nan, 1.0, False)],
)
def test_parity_in_every_step(gap, norm, passed):
    good = {"parity/logp_abs_diff_mean": 0.001, "policy/grad_norm": 1.0}
    bad = {"parity/logp_abs_diff_mean": gap, "policy/grad_norm": norm}
    results = {"whole": result(good, bad), "doctor": result()}
    assert judges.parity_below(0.02, "whole")(results)[0] == passed


@pytest.mark.parametrize("skipped, passed", [(1.0, True), (0.0, False)])
def test_steps_of_fp16_may_be_skipped(skipped, passed):
    step = {"parity/logp_abs_diff_mean": 0.0, "policy/grad_norm": math.nan, "health/skipped_steps": skipped}
    assert judges.parity_below(0.02)({"fp16": result(step)})[0] == passed
    assert not judges.parity_below(0.02)({"bf16": result(step)})[0]


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
    found, shown = judges.decoding_agrees(2e-3)(results)
    assert found == passed and shown.endswith("divided by static: hf 2.5, narrow 1.5")


def test_a_resumed_run_may_differ_in_times_only():
    straight = [{"step": 1, "policy/loss": 0.5, "time/step": 1.0}, {"step": 2, "policy/loss": 0.25}]
    resumed = [
        {"step": 1, "policy/loss": 0.5, "time/step": 3.0, "time": 7.0, "health/rank_time_spread_s": 1.0},
        {"step": 2, "policy/loss": 0.25},
    ]
    results = {"straight": result(*straight), "resumed": result(*resumed)}
    assert judges.same_after_resume(results) == (True, "2 steps: all metrics are equal")
    resumed[1]["policy/loss"] = 0.25000001
    assert judges.same_after_resume(results) == (False, "2 steps: different: policy/loss")
    with pytest.raises(ValueError):  # a step is missing
        judges.same_after_resume(results | {"resumed": result(resumed[0])})


@pytest.mark.parametrize("estimate, passed", [(48.0, True), (65.0, True), (47.0, False), (67.0, False)])
@pytest.mark.parametrize(
    "line", ["fits       {} GiB of 75.0 GiB available", "too much   {} GiB in update, of 40.0 GiB"]
)
def test_the_estimate_may_be_a_third_too_high_and_a_twentieth_too_low(estimate, passed, line):
    results = {
        "expandable": result({"mem/reserved_peak_gb": 50.0, "mem/host_rss_gb": 1.0}),
        "fixed": result({"mem/reserved_peak_gb": 55.0, "mem/host_rss_gb": 1.0}),
        "doctor": result(log="work       1 TFLOP\n" + line.format(estimate)),
    }
    assert judges.memory_estimate("expandable", 0.95, 1.33)(results)[0] == passed


def test_no_forward_or_backward_may_synchronize_the_device():
    line = "\nrank {}: synchronizations of the device: {}\n"
    none, some = (
        result(log=line.format(0, "0 {}") + line.format(1, found))
        for found in ("0 {}", "4 {'forward: a.py': 4}")
    )
    assert judges.waits({"steps": none})[0]
    passed, shown = judges.waits({"steps": some})
    assert not passed and shown == "4 in forwards and backwards of two steps {'forward: a.py': 4}"
    with pytest.raises(ValueError):  # nothing was counted
        judges.waits({"steps": result(log="killed")})


def test_growth_of_memory_after_the_third_step():
    flat = [{"mem/reserved_peak_gb": peak, "mem/host_rss_gb": 2 * peak} for peak in (3.0, 4.0, 5.0, 5.0, 5.1)]
    grown = [*flat, {"mem/reserved_peak_gb": 5.2, "mem/host_rss_gb": 5.0}]
    assert judges.no_growth(1.02)({"steps": result(*flat)})[0]
    assert not judges.no_growth(1.02)({"steps": result(*grown)})[0]


@pytest.mark.parametrize(
    "log, passed",
    [
        ("error: out of memory: memory.train_tokens=8 is halved", True),
        ("Traceback (most recent call last):\nmemory.train_tokens", False),
        ("killed", False),
    ],
)
def test_out_of_memory(log, passed):
    assert judges.out_of_memory({"update": result(code=1, log=log)})[0] == passed


@pytest.mark.parametrize(
    "log, seconds, passed",
    [
        ("{line}\nTraceback of the launcher", 69.0, True),
        ("{line}", 71.0, False),
        ("Traceback\n{line}", 30.0, False),
        ("{line}\n{line}", 30.0, False),
        ("", 30.0, False),
    ],
)
def test_a_killed_rank(log, seconds, passed):
    line = "rank 0: stopped because rank 1 failed (its process died)"
    killed = result(log=log.format(line=line), seconds=seconds)
    assert judges.ended_together({"whole": result(seconds=10.0), "killed": killed})[0] == passed


def test_efficiency_of_ranks():
    one, both = result({"time/step": 7.0}), result({"time/step": 10.0})
    assert judges.efficiency(8, 0.7)({"one": one, "all": both})[0]
    assert not judges.efficiency(8, 0.71)({"one": one, "all": both})[0]


@pytest.mark.parametrize("gap, k3, passed", [(0.01, 0.002, True), (0.03, 0.5, False), (0.01, 0.001, False)])
def test_weights_must_have_moved_by_five_times_the_gap(gap, k3, passed):
    step = {"parity/logp_abs_diff_mean": gap, "kl/k3_token_mean": k3}  # sqrt(2 k3): 0.063, 1, 0.045
    assert judges.weights_follow(0.02)({"plain": result(step)})[0] == passed


def test_a_second_start_finds_what_was_compiled():
    line = "vllm start: {} s; cache: ['ppo_ds/1'{}]"
    compiled, plain = ", 'torch_compile_cache/1'", ""

    def passed(first, second, compiles=True):
        results = {n: result(log=line.format(*how)) for n, how in (("cold", first), ("warm", second))}
        return judges.cache_is_hit(compiles)(results)[0]

    assert passed((60.0, compiled), (20.0, compiled)) and not passed((60.0, compiled), (61.0, compiled))
    assert not passed((60.0, compiled), (20.0, compiled + ", 'torch_compile_cache/2'"))
    assert not passed((60.0, plain), (20.0, plain)) and passed((2.0, plain), (3.0, plain), compiles=False)


@pytest.mark.parametrize(
    "asleep, passed", [((70.0, 69.0), True), ((70.0, 68.0), False), ((67.0, 67.0), False), ((70.0,), False)]
)
def test_memory_is_free_while_the_engine_sleeps(asleep, passed):
    lines = [f"vllm awake: 60.0 GiB free; asleep: {free} GiB free" for free in asleep]
    assert judges.memory_returned(8.0)({"sleep": result(log="\n".join(lines))})[0] == passed


def test_a_killed_or_unreadable_run_fails_its_check(tmp_path, capsys):
    sleeps = Run("sleeps", ["-c", "import time; time.sleep(600)"], minutes=0.01)
    crashes = Run("crashes", ["-c", "raise SystemExit('no metrics')"])
    checks = {
        "slow": Check("speed", "?", [sleeps], judges.no_growth(1.02)),
        "code": Check("speed", "?", [crashes], judges.no_growth(1.02)),
        "unread": Check("speed", "?", [replace(crashes, codes=(1,))], judges.first_gradients),
    }
    for name, check in checks.items():
        assert gpu_checks.perform(name, check, tmp_path, on_cpu=False) is False
    printed = capsys.readouterr().out
    assert "FAILED  slow: unexpected exit code of sleeps" in printed and "exit codes: sleeps None" in printed
    assert "FAILED  code: unexpected exit code of crashes" in printed and "exit codes: crashes 1" in printed
    assert "FAILED  unread: the results could not be read (IndexError" in printed
    assert (tmp_path / "unread_crashes.log").read_text() == "no metrics\n"
    recorded = json.loads((tmp_path / "results.json").read_text())
    assert [entry["passed"] for entry in recorded["checks"].values()] == [False] * 3
    assert len(recorded["rows"]) == 3
    row = recorded["rows"][1]
    assert row.startswith("| `code` | CPU, torch ") and row.endswith(
        "| FAILED: unexpected exit code of crashes (None: killed at the time limit); see the logs |"
    )


@pytest.mark.parametrize(("given", "seen"), [("2,5", "2"), (None, "0")])
def test_commands_see_one_gpu(tmp_path, monkeypatch, given, seen):
    """The doctor counts all visible GPUs, and the runs that it is compared with have one rank."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    run = Run("shows", ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"])
    assert execute(run, tmp_path, on_cpu=False).log == f"{seen}\n"


@pytest.mark.parametrize(("seconds", "passed"), [(0.98, True), (0.96, False)])
def test_attention_without_cudnn_may_be_as_fast_up_to_noise(seconds, passed):
    steps = {"default": result({"time/step": 1.0}), "cudnn": result({"time/step": seconds})}
    assert CHECKS["attention"].judge(steps)[0] == passed


def test_a_fault_that_is_not_detected_fails_its_check(tmp_path, capsys):
    run = Run("prints", ["-c", "print('good')"])
    found = Fault("bad output", [replace(run, command=["-c", "print('bad')"])])
    missed = Fault("other output", [replace(run, command=["-c", "print('good enough')"])])
    check = Check("speed", "?", [run], lambda r: ("good" in r["prints"].log, "read"), [found])
    assert gpu_checks.perform("all", check, tmp_path, on_cpu=True, inject=True) is True
    both = replace(check, faults=[found, missed])
    assert gpu_checks.perform("some", both, tmp_path, on_cpu=True, inject=True) is False
    printed = capsys.readouterr().out
    assert "passed  some: read" in printed and "MISSED other output: read" in printed
    assert printed.count("detected bad output: read") == 2
    faults = json.loads((tmp_path / "results.json").read_text())["checks"]["some"]["faults"]
    assert [fault["detected"] for fault in faults.values()] == [True, False]


def test_a_skipped_check_has_no_row_and_is_not_passed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "find_spec", lambda name: None)
    assert gpu_checks.main(["vllm", "--cpu", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "skipped vllm_sync: vllm is not installed\n" in printed
    assert printed.endswith("0 passed, 0 FAILED, 4 skipped\n")
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == []


@pytest.mark.parametrize(
    "count, names, line",
    [
        (0, ["gradients"], "error: torch finds no GPU: "),
        (1, ["speed", "two"], "error: ranks needs 2 GPUs, torch finds 1\n"),
        (2, ["eight"], "error: ranks_eight needs 8 GPUs, torch finds 2\n"),
    ],
)
def test_without_enough_gpus_nothing_runs(tmp_path, monkeypatch, capsys, count, names, line):
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert gpu_checks.main([*names, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(line) and not (tmp_path / "out").exists()


def test_variants_are_added_to_the_script_of_a_launched_run():
    run = Run("two", ["-m", "torch.distributed.run", "benchmarks/ppo_step.py", "W1"])
    once = varied(run, "leak")
    assert list(once.command)[2:] == ["benchmarks/checks/variants.py", "leak", "benchmarks/ppo_step.py", "W1"]
    assert list(varied(once, "waiting").command)[3] == "leak,waiting"


@pytest.mark.nightly
@pytest.mark.parametrize("block", MINUTES)
def test_checks_pass_on_the_cpu_and_detect_their_faults(tmp_path, block):
    done = run_python(
        "benchmarks/gpu_checks.py", block, "--cpu", "--inject", "--out", str(tmp_path), minutes=60
    )
    if "vllm is not installed" in done.stdout:
        pytest.skip("vllm is not installed; make test-vllm installs it")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED  " not in done.stdout and "MISSED" not in done.stdout
    content = json.loads((tmp_path / "results.json").read_text())
    names = [name for name, check in CHECKS.items() if check.block == block]
    assert list(content["checks"]) == names
    for name, check in content["checks"].items():
        assert check["passed"] is None or len(check["faults"]) == len(CHECKS[name].faults), name


@pytest.mark.slow
def test_a_check_runs_on_the_cpu(tmp_path):
    done = run_python("benchmarks/gpu_checks.py", "waits", "--cpu", "--inject", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed  waits: 0 in forwards" in done.stdout and "detected each forward waits: " in done.stdout
