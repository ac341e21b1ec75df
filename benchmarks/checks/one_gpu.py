"""The blocks correctness and speed: checks on one GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.checks import judges
from benchmarks.checks.runs import (
    Check,
    Fault,
    Results,
    Run,
    doctor_run,
    prepare_run,
    step_run,
    train_run,
    varied,
    with_environment,
)

TINY = ["--dry"]
# mean gap that rounding to bf16 may cause; on a CPU, decoding and a forward of W3's trunk differ by 0.007
BF16_NATS = 0.02
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
    "lora": ("actor.lora.rank=8", "critic.lora.rank=8"),
}
FP16 = ("actor.model.dtype=fp16", "critic.model.dtype=fp16", "reward.model.dtype=fp16")


def logged(run: str, line: str) -> Callable[[Results], Results]:
    """Returns a change of the results that adds a line to the log of a run, before the others."""
    return lambda results: {**results, run: replace(results[run], log=f"{line}\n{results[run].log}")}


def estimates(log: str = "fits       {} GiB of 75.0 GiB") -> list[Fault]:
    """Returns faults of the doctor: an estimate that is far too low, and one that is far too high."""
    return [
        Fault("estimate too low", change=logged("doctor", log.format("0.0000001"))),
        Fault("estimate too high", change=logged("doctor", log.format("1000000"))),
    ]


def paths(tiny: bool) -> Check:
    # the trainer refuses fp16 on a CPU
    kinds = PATHS if tiny else PATHS | {"fp16": FP16}
    runs = {
        name: step_run(name, "W5", *settings, minutes=1.2, options=TINY) for name, settings in kinds.items()
    }
    return Check(
        "correctness",
        "Does every path run on the device: offloading, ZeRO-3, generation by layers, fp16, LoRA?",
        list(runs.values()),
        judges.parity_below(2e-3),
        [
            Fault("log-probs are wrong", [varied(runs["layers"], "wrong_logprobs")]),
            Fault("an error", [with_environment(runs["lora"], PPO_DS_FAULT="raise@update")]),
        ],
    )


def gradients(options: Sequence[str]) -> Check:
    settings = {
        "packed": "memory.layout=packed",
        "padded": "memory.layout=padded",
        **{f"stage{stage}": f"zero=stage{stage}" for stage in (1, 2, 3)},
    }
    runs = {
        name: step_run(name, "W1", setting, minutes=1.2, options=options)
        for name, setting in settings.items()
    }
    return Check(
        "correctness",
        "Do packed and padded rows, and the ZeRO stages, have the same gradient?",
        list(runs.values()),
        judges.first_gradients,
        [
            Fault(f"gradients of {name} are wrong", [varied(runs[name], "scaled_loss")])
            for name in ("packed", "stage3")
        ],
    )


def waits(block: str, ranks: int = 1, *settings: str) -> Check:
    run = step_run("steps", "W5", *settings, minutes=0.7 * ranks, options=TINY, ranks=ranks)
    counted = varied(run, "count_waits")
    return Check(
        block,
        "Does a forward or a backward synchronize the device?",
        [counted],
        judges.waits,
        [Fault("each forward waits", [varied(counted, "waiting")])],
    )


def decoding(size: Sequence[str]) -> Check:
    static = step_run("static", "W3", "rollout.backend=static", minutes=2.5, options=size)
    return Check(
        "correctness",
        "Do log-probs of decoding agree with training? Are CUDA graphs recorded? What do they gain?",
        [
            static,
            step_run("hf", "W3", "rollout.backend=hf", minutes=3.0, options=size),
            varied(step_run("narrow", "W3", minutes=2.5, options=size), "narrow_graphs"),
        ],
        judges.decoding_agrees(BF16_NATS if not size else 2e-3),
        [
            Fault("log-probs are wrong", [varied(static, "wrong_logprobs")]),
            Fault("no graphs", change=logged("static", "decoding continues without CUDA graphs, slower")),
        ],
    )


def attention(size: Sequence[str], tiny: bool) -> Check:
    default, cudnn = (
        step_run(name, "W3", steps=2, minutes=minutes, options=size)
        for name, minutes in (("default", 3.0), ("cudnn", 4.0))
    )
    return Check(
        "speed",
        "What does cuDNN's attention cost where shapes change? The default does not use it.",
        [default, with_environment(cudnn, TORCH_CUDNN_SDPA_DEPRIORITIZED="0")],
        # steps of milliseconds vary on a busy CPU
        judges.ratio_of("time/step", 0.1 if tiny else 0.97, math.inf),
        [
            Fault(
                "the default is slow",
                [with_environment(default, PPO_DS_FAULT="slow@update:times=0:seconds=10")],
            )
        ],
    )


def memory(size: Sequence[str], tiny: bool) -> Check:
    fixed = step_run("fixed", "W4", minutes=3.0, options=size)
    return Check(
        "speed",
        "Is the doctor's estimate of memory right? What do expandable segments save?",
        [
            step_run("expandable", "W4", minutes=3.5, options=size),
            with_environment(fixed, PYTORCH_ALLOC_CONF="expandable_segments:False"),
            doctor_run("W4", size, on_cpu=tiny),
        ],
        judges.memory_estimate("expandable", *((1e-4, 1.33) if tiny else (0.95, 1.33))),
        estimates(),
    )


def out_of_memory(size: Sequence[str], tiny: bool) -> Check:
    update = step_run(
        "update",
        "W3",
        "memory.train_tokens=1000000",
        minutes=2.5,
        options=[*size, "--prompts", "512"],
        environment={"PPO_DS_FAULT": "memory@update"} if tiny else {},
        codes=(1,),
        folder="W3_512",
    )
    return Check(
        "speed",
        "Does an update that is out of memory end with one line?",
        [update],
        judges.out_of_memory,
        [
            Fault("another error", [with_environment(update, PPO_DS_FAULT="raise@update")]),
            Fault("a traceback", change=logged("update", "Traceback (most recent call last):")),
        ],
    )


def resume(
    block: str,
    options: Sequence[str],
    *settings: str,
    new_tokens: int,
    ranks: int = 1,
    needs: str | None = None,
) -> Check:
    """Returns the check of a run that SIGTERM stops in the third of its four generations."""
    minutes = 1.5 if ranks == 1 else 2.2
    straight, whole, resumed = (
        train_run(name, f"{block}_{folder}", options, *settings, ranks=ranks, minutes=minutes)
        for name, folder in (("straight", "straight"), ("stopped", "stopped"), ("resumed", "stopped"))
    )
    resumed = replace(resumed, starts_anew=False)
    # the comparison of log-probs at the start generates a few tokens too; torchrun ends with 1
    fault = f"stop@generate.step:at={2 * new_tokens + 2}"
    stopped = replace(whole, environment={"PPO_DS_FAULT": fault}, codes=(143, 1)[:ranks])
    return Check(
        block,
        "Is a run equal to another one that was stopped while it generated? (run.deterministic=true)",
        [prepare_run("W1", options), straight, stopped, resumed],
        judges.same_after_resume,
        [Fault("weights are lost", [stopped, varied(resumed, "lost_weights")])],
        needs,
    )


def one_gpu_checks(tiny: bool) -> dict[str, Check]:
    """Returns the checks by name, in the order in which they run; ``tiny`` uses dry workloads."""
    size = TINY if tiny else []
    bf16 = [*size, "--dtype", "bf16"]
    versions = Run("versions", ["-c", VERSIONS], 1.0)
    growth = step_run("steps", "W2", steps=9, minutes=2.0, options=bf16)
    return {
        "versions": Check(
            "correctness",
            "Which versions and which GPU? Are the defaults of the environment set?",
            [versions],
            judges.environment_set,
            [Fault("another default", [with_environment(versions, TORCH_CUDNN_SDPA_DEPRIORITIZED="0")])],
        ),
        "paths": paths(tiny),
        "gradients": gradients(bf16),
        "waits": waits("correctness"),
        "decoding": decoding(size),
        "attention": attention(size, tiny),
        "memory": memory(size, tiny),
        "growth": Check(
            "speed",
            "Does memory grow from step to step?",
            [growth],
            # allocators of a CPU keep more from step to step
            judges.no_growth(1.2 if tiny else 1.02),
            [Fault("a leak", [varied(growth, "leak")])],
        ),
        "out_of_memory": out_of_memory(size, tiny),
        "resume": resume("speed", bf16, new_tokens=4 if tiny else 64),
    }
