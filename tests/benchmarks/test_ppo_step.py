"""Tests that the benchmark runs, that its figures are consistent, and that its counts match hand computation.

The speed is not tested.
"""

import ast
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import against, ppo_step, trl_step
from benchmarks.counting import Lengths, Sizes, decode_traffic, phase_flops
from benchmarks.options import overrides, parsed
from benchmarks.report import Limits, figures, limit_fractions, table
from ppo_ds.compute.sizes import Size
from ppo_ds.errors import UserError
from ppo_ds.run.performance import UpdateCost
from tests.support.environment import run_python

ROOT = Path(__file__).parents[2]
STEPS, PASSES = 1, 3


@pytest.mark.slow
def test_the_figures_of_a_run_are_consistent(tmp_path):
    command = f"benchmarks/ppo_step.py W2 --dry --threads 1 --steps {STEPS} --set algo.epochs={PASSES}"
    command += f" --set rollout.backend=hf --folder {tmp_path} --json {tmp_path}/out.json"
    done = run_python(*command.split())
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "run" / "model").exists()  # nothing is exported
    for word in ("generate", "update_actor", "samples/s", "pad_frac", "host_rss_gb", "GEMM peak", "decode"):
        assert word in done.stdout, word
    found = json.loads((tmp_path / "out.json").read_text())
    assert "rollout.backend=hf" in found["overrides"] and found["machine"]["threads"] == 1

    rates = ("samples_per_s", "tokens_per_s", "new_tokens_per_s", "decode_bandwidth_fraction")
    numbers = [found[name] for name in rates]
    for name in ("seconds", "mfu", "metrics", "limits"):
        numbers += found[name].values()
    assert all(math.isfinite(number) for number in numbers)
    assert min(found["limits"].values()) > 0 and all(0 < share < 1 for share in found["mfu"].values())

    # the first step is not counted
    assert found["steps"] == len(found["seconds_per_step"]) == len(found["cpu_seconds"]) == STEPS
    all_ranks = zip(found["cpu_seconds_of_all_ranks"], found["cpu_seconds"], strict=True)
    assert all(total >= own > 0 for total, own in all_ranks)
    for step in found["seconds_per_step"]:
        phases = sum(seconds for name, seconds in step.items() if name != "time/step")
        assert phases == pytest.approx(step["time/step"], abs=1e-6)

    # a forward and a backward cost as much as three forwards, so three passes cost nine forwards
    flops = {name: share * found["seconds"][name] for name, share in found["mfu"].items()}
    assert flops["time/update_actor"] / flops["time/ref_logprobs"] == pytest.approx(9)
    assert flops["time/update_critic"] / flops["time/values"] == pytest.approx(9)

    assert found["samples_per_s"] * found["seconds"]["time/step"] == pytest.approx(8)
    assert found["samples_per_step"] == 8 and 1 <= found["response_tokens_mean"] <= 16
    assert 8 * (1 + 1) <= found["tokens_per_s"] * found["seconds"]["time/step"] <= 8 * (8 + 16)


# -- counting ------------------------------------------------------------------------------------------------


def test_decode_steps_and_their_contexts():
    step = Lengths(prompts=[3, 2], responses=[4, 1])
    # row 1: after the prompt's forward, three steps read a token each, with 4, 5 and 6 positions to attend
    # to; row 2 needs no step
    assert step.decode_steps == 3
    assert step.contexts == 15


ACTOR = Size(body=100, head=10, layers=1, width=2, kv_width=2)


def test_flops_of_a_step_by_hand():
    # two forwards instead of three, since the critic's weights are frozen
    critic = UpdateCost(Size(body=101, head=0, layers=1, width=2, kv_width=2), forwards=2)
    sizes = Sizes(actor=UpdateCost(ACTOR, forwards=3), critic=critic, bytes_each=4)
    found = phase_flops(sizes, Lengths(prompts=[2], responses=[1]), epochs=2)
    # a forward of the actor: 3 tokens x 200, 6 pairs x 8, and the head at one position, 20: 668. A forward of
    # the critic: 3 x 202 + 48 = 654
    assert found["time/ref_logprobs"] == 668
    assert found["time/values"] == found["time/reward"] == 654
    assert found["time/update_actor"] == 2 * 3 * 668
    assert found["time/update_critic"] == 2 * 2 * 654
    assert found["time/generate"] == 2 * 200 + 3 * 8 + 20  # the last sampled token is not an input


def test_bytes_of_decoding_by_hand():
    sizes = Sizes(actor=UpdateCost(ACTOR, 3), critic=None, bytes_each=2)
    # three steps on each of two ranks read 110 weights, and 15 positions have 4 numbers, of two bytes each
    assert decode_traffic(sizes, Lengths(prompts=[3, 2], responses=[4, 1]), ranks=2) == 2 * (
        2 * 3 * 110 + 15 * 4
    )


def record(step: float, generate: float) -> dict[str, float]:
    return {
        "time/step": step,
        "time/generate": generate,
        "time/other": step - generate,
        "mem/host_rss_gb": 1.0,
        "rollout/pad_frac": 0.25,
        "step": 1,
    }


def test_figures_are_medians_over_steps():
    steps = [Lengths([2, 2], [1, 3])] * 3
    found = figures([record(1.0, 0.5), record(4.0, 1.0), record(2.0, 0.5)], steps, cpu=[1.0, 4.0, 2.0])
    assert found["seconds"] == {"time/step": 2.0, "time/generate": 0.5, "time/other": 1.5}
    assert (found["samples_per_s"], found["tokens_per_s"], found["new_tokens_per_s"]) == (1.0, 4.0, 2.0)
    assert found["metrics"] == {"mem/host_rss_gb": 1.0, "rollout/pad_frac": 0.25}


def test_distance_to_the_limits():
    sizes = Sizes(actor=UpdateCost(ACTOR, 3), critic=None, bytes_each=2)
    steps = [Lengths([2], [1])]
    found = figures([record(4.0, 2.0)], steps, cpu=[4.0])
    reached = limit_fractions(
        found, steps, sizes, epochs=[2.0], limits=Limits(gemm_flops_per_s=444.0, bytes_per_s=1000.0), ranks=1
    )
    # 444 FLOPs in 2 of 4 seconds; phases that did not run are not listed
    assert reached["mfu"] == {"time/generate": 0.5, "time/step": 0.25}
    # the first token of a response comes from the prompt's forward
    assert reached["decode_bandwidth_fraction"] == 0.0
    assert "50.0 %" in table(found | reached | {"workload": "W0", "machine": {}})


def test_updates_count_the_passes_that_ran():
    """Two steps have one sample each, so a pass is 3 x 668 = 2004 FLOPs.

    There are three passes, and half a pass after an early stop, at 4008 FLOPs per second.
    """
    sizes = Sizes(actor=UpdateCost(ACTOR, 3), critic=None, bytes_each=2)
    steps = [Lengths([2], [1])] * 2
    records = [
        {"time/step": 4.0, "time/generate": 1.0, "time/update_actor": seconds} for seconds in (3.0, 1.0)
    ]
    found = figures(records, steps, cpu=[1.0, 1.0])
    reached = limit_fractions(
        found,
        steps,
        sizes,
        epochs=[3.0, 0.5],
        limits=Limits(gemm_flops_per_s=4008.0, bytes_per_s=1000.0),
        ranks=1,
    )
    assert reached["mfu"]["time/update_actor"] == pytest.approx((0.5 + 0.25) / 2)


# -- against another trainer ---------------------------------------------------------------------------------


def test_ratios_of_a_pair():
    ours = {"step_seconds": [1.0, 3.0], "cpu_seconds": [1.0, 1.0], "samples_per_step": 8, "memory_gb": 1.5}
    trl = {"step_seconds": [4.0, 8.0], "cpu_seconds": [3.0, 5.0], "samples_per_step": 8, "memory_gb": 2.0}
    pair = against._pair(ours, trl)
    assert (pair["samples_per_s"], pair["cpu_seconds"], pair["memory"]) == (3.0, 4.0, 0.75)


def test_the_options_of_a_comparison_do_not_reach_its_runs():
    argv = [
        "W2",
        "--against",
        "trl",
        "--threads",
        "1",
        "--trl-python=x",
        "--pairs",
        "5",
        "--set",
        "zero=stage2",
        "--json",
        "a",
    ]
    assert against.without(argv, against.OWN) == ["W2", "--set", "zero=stage2"]


def test_both_sides_get_the_threads_of_the_parent():
    argv = ["W2", "--against", "trl", "--trl-python", "x", "--threads=7"]
    args = parsed(argv)
    args.threads = 3  # as resolved by the benchmark
    ours, trl = (
        parsed(against.own_arguments(args, argv, Path("a"))),
        trl_step.parsed(against.their_arguments(args, Path("b"))),
    )
    assert (ours.threads, trl.threads) == (3, 3)


def test_given_weights_end_their_answers_on_both_sides():
    never = "sampling.stop_token_ids=[]"
    for words, ends in ((["W1"], False), (["W1", "--model", "m"], True), (["W2"], True)):
        args = parsed([*words, "--threads", "1"])
        assert (never not in overrides(args)) is ends
        assert trl_step.parsed(against.their_arguments(args, Path("out.json"))).stop is ends


def test_trl_answers_end_at_the_stop_token_it_has():
    answers = torch.tensor([[9, 9, 1, 7, 5], [9, 9, 7, 7, 1], [9, 9, 3, 4, 1]])  # queries of two tokens
    for stop, mean in ((7, (2 + 1 + 3) / 3), (1, (1 + 3 + 3) / 3), (None, 3.0)):
        trl = SimpleNamespace(batch_generation=lambda *_: (answers, None))
        means = trl_step.watch_lengths(trl, stop)
        trl.batch_generation(None, answers[:, :2])
        assert means == [pytest.approx(mean)]


def test_trl_gets_the_same_work():
    args = parsed(["W2", "--threads", "1", "--steps", "4", "--folder", "work"])
    asked = trl_step.parsed(against.their_arguments(args, Path("out.json")))
    assert (
        asked.prompts,
        asked.new_tokens,
        asked.epochs,
        asked.minibatches,
        asked.micro_rows,
        asked.rollout_rows,
    ) == (32, 256, 2, 2, 16, 32)
    assert (asked.steps, asked.threads, asked.stop, asked.dtype, asked.folder) == (
        4,
        1,
        True,
        "fp32",
        Path("work"),
    )


def test_both_trainers_make_the_given_optimizer_steps():
    args = parsed(["W1", "--passes", "1", "--minibatches", "4", "--threads", "1"])
    asked = trl_step.parsed(against.their_arguments(args, Path("out.json")))
    assert (asked.epochs, asked.minibatches, asked.micro_rows) == (1, 4, 8)
    assert {"algo.epochs=1", "algo.minibatch_size=8"} <= set(overrides(args))


def test_a_comparison_without_trl_reports_its_requirements(capsys):
    with pytest.raises(SystemExit) as left:
        parsed(["W1", "--against", "trl"])
    assert left.value.code == 2
    assert "--trl-python" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps"),
        (["--prompts", "3"], "does not divide the 3 prompts"),
        (["--minibatches", "5"], "--minibatches 5"),
        (["--pairs", "5"], "--pairs"),
        (["--trl-python", "x"], "--trl-python"),
        (["--trl-micro-rows", "4"], "--trl-micro-rows"),
        (["--against", "trl", "--trl-python", "x", "--set", "run.threads=2"], "--threads"),
        (["--ranks", "2"], "--against plain"),
        (["--against", "trl", "--trl-python", "x", "--ranks", "2"], "--against plain"),
        (["--against", "plain", "--trl-python", "x"], "--against trl"),
        (["--against", "trl", "--trl-python", "x", "--trl-micro-rows", "3"], "does not divide the 16"),
        (["--against", "plain", "--cpu-seconds", "--threads", "1"], "--cpu-seconds cannot"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        parsed(["W1", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("python", ["missing/python", "/bin/false"])
def test_a_python_without_trl_is_refused_before_the_first_run(python, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(against, "_ours", lambda *_: pytest.fail("a run was started"))
    argv = ["W1", "--against", "trl", "--trl-python", python, "--folder", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        against.compare(parsed(argv), argv)
    assert left.value.code == 2
    assert f"--trl-python {python}: cannot" in capsys.readouterr().err.splitlines()[-1]


def test_a_comparison_is_not_started_by_a_launcher_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parsed(["W1"]).pairs == 5  # --scaling starts runs with several ranks itself
    with pytest.raises(SystemExit):
        parsed(["W1", "--against", "trl", "--trl-python", "x"])
    assert "2 ranks" in capsys.readouterr().err.splitlines()[-1]


def test_a_benchmark_does_not_measure_the_cpu_of_a_gpu_machine(monkeypatch, capsys):
    """As in launch/train.py, a GPU that torch cannot use ends the start."""

    def refuse(verbose, trains=False, fixed_segments=True):
        assert trains and not fixed_segments
        raise UserError("torch cannot use the GPU")

    config = SimpleNamespace(run=SimpleNamespace(verbose=False), rollout=SimpleNamespace(own_weights=False))
    monkeypatch.setattr("launch.cli.load_config", lambda overrides: config)
    monkeypatch.setattr("launch.process.prepare_environment", refuse)
    monkeypatch.setattr("launch.process.exit_now", sys.exit)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        ppo_step.measure(parsed(["W1"]))
    assert end.value.code == 2 and capsys.readouterr().err == "error: torch cannot use the GPU\n"


@pytest.mark.parametrize("other", ["trl_step", "plain_loop"])
def test_other_trainers_import_nothing_of_the_project(other):
    tree = ast.parse((ROOT / "benchmarks" / f"{other}.py").read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [module for module in modules if module.split(".")[0] in ("ppo_ds", "benchmarks", "launch")]
