"""Checks properties on one GPU that tests on a CPU cannot show. No network is needed.

    python benchmarks/gpu_checks.py --list
    python benchmarks/gpu_checks.py correctness        # a block: at most 25 minutes
    python benchmarks/gpu_checks.py speed              # the other block
    python benchmarks/gpu_checks.py gradients growth    # single checks: below 10 minutes each

A check runs the benchmark or the trainer one or several times and compares the runs. Each run has a time
limit; the limits of a block sum up to at most 25 minutes. Logs, metrics and results.json are written to --out
(default: outputs/gpu_checks). NCCL does not allow two ranks on one GPU, so several ranks are not checked.

Exit code 0: all checks passed; 1: a check failed; 2: a wrong argument, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

from benchmarks.options import overrides, parsed

GIB = 2**30
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A command of a check. ``{out}`` in an argument stands for the folder of results."""

    name: str
    command: Sequence[str]  # arguments of Python
    minutes: float = 1.5  # time limit
    environment: Mapping[str, str] = field(default_factory=dict)
    run_dir: str | None = None  # run directory, relative to the folder of results
    starts_anew: bool = True  # the run directory is deleted first
    codes: Sequence[int] = (0,)  # exit codes that are no failure


@dataclass(frozen=True)
class Result:
    """What a run has left behind."""

    code: int | None  # exit code; None: killed at the time limit
    seconds: float
    log: str
    steps: list[Metrics] = field(default_factory=list)  # lines of metrics.jsonl

    def median(self, name: str) -> float:
        """Returns the median of a metric over the steps, the first excluded if there are several."""
        values = [step[name] for step in self.steps[1:] or self.steps if name in step]
        return statistics.median(values) if values else math.nan


Results = Mapping[str, Result]


@dataclass(frozen=True)
class Check:
    """Runs, and a function that returns what they show and whether that is as expected."""

    block: str
    question: str
    runs: Sequence[Run]
    judge: Callable[[Results], tuple[bool, str]]

    @property
    def minutes(self) -> float:
        return sum(run.minutes for run in self.runs)


def folder_of(workload: str, options: Sequence[str]) -> str:
    """Returns the name of the folder of a workload's models; tiny ones have a folder of their own."""
    return workload + "_dry" * ("--dry" in options)


def step_run(
    name: str,
    workload: str,
    *settings: str,
    steps: int = 1,
    minutes: float = 1.5,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    codes: Sequence[int] = (0,),
    folder: str | None = None,
    script: Sequence[str] = ("benchmarks/ppo_step.py",),
) -> Run:
    """Makes a run of benchmarks/ppo_step.py, or of a ``script`` that takes the same arguments.

    Runs of a workload use the same models and prompts, unless ``folder`` names another folder for them.
    """
    folder = folder or folder_of(workload, options)
    command = [*script, workload, "--steps", str(steps), "--no-limits", *options]
    command += ["--folder", f"{{out}}/{folder}"]
    for setting in settings:
        command += ["--set", setting]
    return Run(name, command, minutes, environment or {}, f"{folder}/run", codes=codes)


def trainer_keys(workload: str, *options: str) -> list[str]:
    """Returns the config of a workload for launch/train.py and launch/doctor.py, without run.*."""
    keys = overrides(parsed([workload, *options, "--folder", "FOLDER"]))
    folder = str(Path("FOLDER").resolve())
    return [
        key.replace(folder, f"{{out}}/{folder_of(workload, options)}")
        for key in keys
        if not key.startswith(("run.", "checkpoint.", "actor.optim.lr="))
    ]


def train_run(
    name: str, run_dir: str, options: Sequence[str], *settings: str, starts_anew: bool = True
) -> Run:
    """Makes a run of four steps of launch/train.py on the models and prompts of W1."""
    keys = [*trainer_keys("W1", *options), f"run.dir={{out}}/{run_dir}", "run.steps=4", "checkpoint.every=2"]
    keys += ["actor.optim.lr=1e-4", "run.deterministic=true", *settings]
    return Run(name, ["launch/train.py", *keys], run_dir=run_dir, starts_anew=starts_anew)


# ---- evaluation of results


def all_ran(results: Results) -> tuple[bool, str]:
    """Expects nothing besides the exit codes, which ``perform`` has compared."""
    return True, f"{len(results)} run(s) ended without an error"


def ratio_of(metric: str, low: float, high: float) -> Callable[[Results], tuple[bool, str]]:
    """Expects that ``metric`` of each run, divided by that of the first run, is in [low, high]."""

    def judge(results: Results) -> tuple[bool, str]:
        first, *others = results.items()
        ratios = {name: result.median(metric) / first[1].median(metric) for name, result in others}
        shown = ", ".join(f"{name} {ratio:.4g}" for name, ratio in ratios.items())
        passed = all(low <= ratio <= high for ratio in ratios.values())
        return passed, f"{metric} = {first[1].median(metric):.4g} ({first[0]}); divided by it: {shown}"

    return judge


def first_gradients(results: Results) -> tuple[bool, str]:
    """Expects that the gradient norms of the first step agree within 5 percent."""
    norms = {name: result.steps[0]["policy/grad_norm"] for name, result in results.items()}
    shown = ", ".join(f"{name} {norm:.5g}" for name, norm in norms.items())
    return max(norms.values()) <= 1.05 * min(norms.values()), f"policy/grad_norm of the first step: {shown}"


def decoding_agrees(results: Results) -> tuple[bool, str]:
    """Expects log-probs of decoding near those of training, and decoding with CUDA graphs."""
    static = results["static"]
    gap, hf = static.median("parity/logp_abs_diff_mean"), results["hf"].median("parity/logp_abs_diff_mean")
    graphs = "without CUDA graphs" not in static.log
    others = {name: results[name].median("time/generate") for name in ("hf", "narrow")}
    ratios = ", ".join(f"{n} {seconds / static.median('time/generate'):.3g}" for n, seconds in others.items())
    shown = f"mean gap {gap:.2g} nats (static), {hf:.2g} (hf); CUDA graphs: {'yes' if graphs else 'no'}"
    return gap < 2e-3 and graphs, f"{shown}; seconds of generation, divided by static: {ratios}"


def same_after_resume(results: Results) -> tuple[bool, str]:
    """Expects that a run that was stopped and resumed has the metrics of an uninterrupted one."""
    straight, resumed = results["straight"].steps, results["resumed"].steps

    def numbers(step: Metrics) -> dict[str, float]:
        return {
            name: value
            for name, value in step.items()
            if name.partition("/")[0] not in ("time", "perf", "mem")
        }

    different = sorted(
        name
        for a, b in zip(straight, resumed, strict=True)
        for name in numbers(a).keys() | numbers(b).keys()
        if a.get(name) != b.get(name)
    )
    shown = f"different: {', '.join(dict.fromkeys(different))}" if different else "all metrics are equal"
    return not different, f"{len(straight)} steps: {shown}"


def memory_estimate(results: Results) -> tuple[bool, str]:
    """Expects that the doctor's peak is between 0.95 and 1.33 of the measured one.

    Reserved memory includes what the allocator holds in fragments, which the doctor does not count.
    """
    found = re.search(r"^(?:fits|too much) +([\d.]+) GiB", results["doctor"].log, re.MULTILINE)
    estimated = float(found[1]) if found else math.nan
    peaks = {
        name: result.median("mem/reserved_peak_gb") for name, result in results.items() if name != "doctor"
    }
    shown = ", ".join(f"{name} {peak:.3g}" for name, peak in peaks.items())
    measured = peaks["expandable"]
    return (
        0.95 * measured <= estimated <= 1.33 * measured,
        f"estimate {estimated:.3g} GiB; reserved peaks: {shown}",
    )


def no_growth(results: Results) -> tuple[bool, str]:
    """Expects that reserved memory does not grow after the third step."""
    peaks = [step["mem/reserved_peak_gb"] for step in results["steps"].steps]
    return peaks[-1] <= 1.02 * peaks[
        2
    ], f"reserved peak in GiB, by step: {', '.join(f'{p:.3g}' for p in peaks)}"


def out_of_memory(results: Results) -> tuple[bool, str]:
    """Expects that the run ends with exit code 1 and one line, which names the budget that was halved."""
    result = results["update"]
    lines = [line for line in result.log.splitlines() if "memory.train_tokens" in line]
    shown = lines[-1] if lines else "no line on memory.train_tokens"
    return bool(lines) and "Traceback" not in result.log, shown


def waits(results: Results) -> tuple[bool, str]:
    """Expects that two more steps do not add calls that synchronize the device."""
    found = [re.search(r"^synchronizations of the device: (\d+).*$", r.log, re.M) for r in results.values()]
    one, three = (match for match in found if match)
    return int(one[1]) == int(
        three[1]
    ), f"one step: {one[1]}; {three[0].replace('synchronizations of the device', 'three steps')}"


# runs the benchmark with graphs of 64, 128, 192, ... columns
NARROW_GRAPHS = """
import sys
from benchmarks import ppo_step
from ppo_ds.rollout import continuous_batch
continuous_batch.graph_columns = lambda used: -(-used // 64) * 64
sys.exit(ppo_step.main(sys.argv[1:]))
"""
# runs the benchmark and counts how often it, or DeepSpeed, synchronizes the device
COUNT_WAITS = """
import sys
from collections import Counter
from benchmarks import ppo_step
train = ppo_step.run
def run(config, args):  # torch is imported once the environment is prepared
    import torch
    from deepspeed.accelerator import get_accelerator
    callers = Counter()
    def counted(function):
        def synchronize(*args, **kwargs):
            callers[sys._getframe(1).f_code.co_filename] += 1
            return function(*args, **kwargs)
        return synchronize
    torch.cuda.synchronize = counted(torch.cuda.synchronize)
    accelerator = get_accelerator()
    accelerator.synchronize = counted(accelerator.synchronize)
    found = train(config, args)
    print("synchronizations of the device:", callers.total(), dict(callers))
    return found
ppo_step.run = run
sys.exit(ppo_step.main(sys.argv[1:]))
"""
VERSIONS = """
import deepspeed, os, torch, transformers
from launch.process import prepare_environment
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
print("deepspeed", deepspeed.__version__, "transformers", transformers.__version__)
for i in range(torch.cuda.device_count()):
    gpu, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
    print(gpu.name, f"sm{gpu.major}{gpu.minor}", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
prepare_environment(verbose=False)
libraries = ("TORCH_", "PYTORCH_", "NCCL_", "CUDA_", "CUBLAS_")
print({name: value for name, value in os.environ.items() if name.startswith(libraries)})
"""
PATHS: dict[str, Sequence[str]] = {
    "default": (),
    "frozen": ("reference.zero.offload_params=true", "reward.zero.offload_params=true"),
    "stage3": ("zero=stage3",),
    "layers": ("zero=stage3", "actor.zero.generation_gather=layers", "actor.zero.offload_states=always"),
    "offload": ("zero=stage3_offload",),
    "fp16": ("actor.model.dtype=fp16", "critic.model.dtype=fp16", "reward.model.dtype=fp16"),
    "lora": ("actor.lora.rank=8", "critic.lora.rank=8"),
}
TINY = ["--dry"]
PREPARE = ["benchmarks/ppo_step.py", "W1", "--prepare-only"]


def all_checks(tiny: bool = False) -> dict[str, Check]:
    """Returns the checks by name, in the order in which they run; ``tiny`` uses dry workloads."""
    size = TINY if tiny else []
    bf16 = [*size, "--dtype", "bf16"]
    return {
        "versions": Check(
            "correctness",
            "Which versions and which GPU? Are the defaults of the environment set?",
            [Run("versions", ["-c", VERSIONS], 1.0)],
            all_ran,
        ),
        "paths": Check(
            "correctness",
            "Does every path run on the device: offloading, ZeRO-3, generation by layers, fp16, LoRA?",
            [step_run(name, "W5", *settings, minutes=1.2, options=TINY) for name, settings in PATHS.items()],
            all_ran,
        ),
        "gradients": Check(
            "correctness",
            "Do packed and padded rows, and the ZeRO stages, have the same gradient?",
            [
                step_run("packed", "W1", "memory.layout=packed", minutes=1.2, options=bf16),
                step_run("padded", "W1", "memory.layout=padded", minutes=1.2, options=bf16),
                *(
                    step_run(f"stage{stage}", "W1", f"zero=stage{stage}", minutes=1.2, options=bf16)
                    for stage in (1, 2, 3)
                ),
            ],
            first_gradients,
        ),
        "waits": Check(
            "correctness",
            "Does a training step synchronize the device?",
            [
                step_run(
                    f"steps{steps}", "W5", steps=steps, minutes=0.7, options=TINY, script=("-c", COUNT_WAITS)
                )
                for steps in (1, 3)
            ],
            waits,
        ),
        "decoding": Check(
            "correctness",
            "Do log-probs of decoding agree with training? Are CUDA graphs recorded? What do they gain?",
            [
                step_run("static", "W3", "rollout.backend=static", minutes=2.5, options=size),
                step_run("hf", "W3", "rollout.backend=hf", minutes=3.0, options=size),
                step_run("narrow", "W3", minutes=2.5, options=size, script=("-c", NARROW_GRAPHS)),
            ],
            decoding_agrees,
        ),
        "attention": Check(
            "speed",
            "What does cuDNN's attention cost where shapes change? The default does not use it.",
            [
                step_run("default", "W3", steps=2, minutes=3.0, options=size),
                step_run(
                    "cudnn",
                    "W3",
                    steps=2,
                    minutes=4.0,
                    options=size,
                    environment={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"},
                ),
            ],
            ratio_of("time/step", 0.97, math.inf),
        ),
        "memory": Check(
            "speed",
            "Is the doctor's estimate of memory right? What do expandable segments save?",
            [
                step_run("expandable", "W4", minutes=3.5, options=size),
                step_run(
                    "fixed",
                    "W4",
                    minutes=3.0,
                    options=size,
                    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
                ),
                Run(
                    "doctor",
                    ["launch/doctor.py", *trainer_keys("W4", *size), "run.dir={out}/doctor", "run.steps=2"],
                    1.0,
                    codes=(0, 1),  # 1: it does not fit, by the estimate
                ),
            ],
            memory_estimate,
        ),
        "growth": Check(
            "speed",
            "Does memory grow from step to step?",
            [step_run("steps", "W2", steps=9, minutes=2.0, options=bf16)],
            no_growth,
        ),
        "out_of_memory": Check(
            "speed",
            "Does an update that is out of memory end with one line?",
            [
                step_run(
                    "update",
                    "W3",
                    "memory.train_tokens=1000000",
                    minutes=2.5,
                    options=[*size, "--prompts", "512"],
                    environment={"PPO_DS_FAULT": "memory@update"} if tiny else {},
                    codes=(1,),
                    folder="W3_512",
                )
            ],
            out_of_memory,
        ),
        "resume": Check(
            "speed",
            "Is a run equal to another one that was stopped while it generated? (run.deterministic=true)",
            [
                Run("prepare", [*PREPARE, *bf16, "--folder", f"{{out}}/{folder_of('W1', bf16)}"], 1.0),
                train_run("straight", "straight", bf16),
                replace(
                    train_run("stopped", "stopped", bf16),
                    # SIGTERM in the sixth round of decode steps
                    environment={"PPO_DS_FAULT": "stop@generate.step:at=6"},
                    codes=(143,),
                ),
                train_run("resumed", "stopped", bf16, starts_anew=False),
            ],
            same_after_resume,
        ),
    }


CHECKS = all_checks()


# ---- running


def main(argv: list[str]) -> int:
    blocks = sorted({check.block for check in CHECKS.values()})
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_checks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="BLOCK_OR_CHECK")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_checks"), help="folder of the results")
    parser.add_argument("--list", action="store_true", help="list the checks with their time limits")
    parser.add_argument("--cpu", action="store_true", help="dry workloads on the CPU, to test this script")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in (*blocks, *CHECKS)]:
        parser.error(f"{unknown[0]}: no such block or check; choose from {', '.join((*blocks, *CHECKS))}")
    if args.list or not args.names:
        print("\n".join(_listing(blocks)))
        return 0
    import torch

    if not (args.cpu or torch.cuda.is_available()):
        print(
            "error: torch finds no GPU: run it on a GPU node, or with --cpu to test the script",
            file=sys.stderr,
        )
        return 2
    passed = [
        perform(name, check, args.out.resolve(), args.cpu)
        for name, check in all_checks(tiny=args.cpu).items()
        if {name, check.block} & set(args.names)
    ]
    return 0 if all(passed) else 1


def _listing(blocks: Sequence[str]) -> list[str]:
    lines = []
    for block in blocks:
        checks = {name: check for name, check in CHECKS.items() if check.block == block}
        lines.append(f"{block}: at most {sum(check.minutes for check in checks.values()):g} minutes")
        lines += [f"  {name:<14} {check.minutes:>4g} min  {check.question}" for name, check in checks.items()]
    return lines


def perform(name: str, check: Check, out: Path, on_cpu: bool) -> bool:
    """Runs a check, prints and records its result, and returns whether it passed."""
    results: dict[str, Result] = {}
    for run in check.runs:
        results[run.name] = execute(run, out, on_cpu)
        (out / f"{name}_{run.name}.log").write_text(results[run.name].log, encoding="utf-8")
    failed = [run.name for run in check.runs if results[run.name].code not in run.codes]
    if failed:
        passed, shown = False, f"unexpected exit code of {', '.join(failed)} (None: killed at the time limit)"
    else:
        try:
            passed, shown = check.judge(results)
        except (LookupError, StopIteration, ValueError, ZeroDivisionError) as error:
            passed, shown = False, f"the results could not be read ({error!r}); see the logs"
    codes = ", ".join(f"{run} {result.code} after {result.seconds:.0f} s" for run, result in results.items())
    print(f"{'passed' if passed else 'FAILED'}  {name}: {shown}\n        exit codes: {codes}", flush=True)
    file = out / "results.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found[name] = {"passed": passed, "shown": shown, "tested": tested_row(name, passed, shown, on_cpu)}
    found[name] |= {"runs": {n: _record(r) for n, r in results.items()}}
    file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return passed


def tested_row(name: str, passed: bool, shown: str, on_cpu: bool) -> str:
    """Returns the row of a check for the table of docs/tested.md: check, device and torch, verdict."""
    import torch

    device = "CPU" if on_cpu or not torch.cuda.is_available() else torch.cuda.get_device_name()
    verdict = f"{'passed' if passed else 'FAILED'}: {shown}".replace("|", "\\|")
    return f"| `{name}` | {device}, torch {torch.__version__} | {verdict} |"


def execute(run: Run, out: Path, on_cpu: bool) -> Result:
    """Runs a command within its time limit and reads its metrics."""
    out.mkdir(parents=True, exist_ok=True)
    run_dir = out / run.run_dir if run.run_dir else None
    if run_dir and run.starts_anew:
        shutil.rmtree(run_dir, ignore_errors=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **run.environment}
    # one GPU, which is also the one that the doctor counts
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [argument.replace("{out}", str(out)) for argument in run.command]
    if on_cpu:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its subprocesses are killed with it
    )
    try:
        log, _ = process.communicate(timeout=None if on_cpu else 60 * run.minutes)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        log, _ = process.communicate()
        code = None
    file = run_dir / "metrics.jsonl" if run_dir else None
    lines = file.read_text(encoding="utf-8").splitlines() if file and file.exists() else []
    return Result(code, time.monotonic() - start, log, [json.loads(line) for line in lines])


def _record(result: Result) -> dict[str, Any]:
    return {"code": result.code, "seconds": result.seconds, "steps": result.steps}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
