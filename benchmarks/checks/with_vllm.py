"""The blocks vllm, on one GPU, and vllm_two: checks of rollout.backend=vllm."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.checks import judges
from benchmarks.checks.one_gpu import TINY, resume
from benchmarks.checks.runs import Check, Fault, Run, step_run, varied, with_environment

VLLM = "rollout.backend=vllm"
# Changes the weights enough to move the log-probs by far more than rounding in each step.
TRAINS = ("actor.optim.lr=3e-4", "critic.optim.lr=1e-5")
CACHE_GB = 8.0  # key-value cache of the check of sleeping
ON_CPU = "vLLM cannot sleep on a CPU"


def vllm_checks(tiny: bool) -> dict[str, Check]:
    """Returns the checks; ``tiny`` uses a dry workload in fp32."""
    workload, options = ("W1", TINY) if tiny else ("W3", [])
    settings = (VLLM, *TRAINS, *(["sampling.max_new_tokens=16"] if tiny else []))
    # in bf16, log-probs of two implementations differ by rounding
    nats = 1e-4 if tiny else 0.03
    short = [*options, "--dtype", "fp32" if tiny else "bf16"]
    return {
        "vllm_start": start(workload, options, settings, tiny),
        "vllm_sync": sync("vllm", workload, options, settings, nats),
        "vllm_sleep": Check(
            "vllm",
            "Does the engine give its memory back while it sleeps, in each step?",
            [
                reported(
                    "sleep", workload, options, *settings, f"rollout.vllm.kv_cache_gb={CACHE_GB:g}", steps=2
                )
            ],
            judges.memory_returned(CACHE_GB),
            [Fault("nothing is freed", change=lambda results: {"sleep": NOT_FREED})],
            needs="vllm",
            only_on_gpu=ON_CPU,
        ),
        "vllm_resume": resume(
            "vllm", short, *settings[:1], *settings[3:], new_tokens=16 if tiny else 64, needs="vllm"
        ),
        "vllm_parallel": sync("vllm_two", workload, options, settings, nats, ranks=2),
    }


NOT_FREED = judges.Result(0, 1.0, 2 * "vllm awake: 20.000 GiB free; asleep: 21.000 GiB free\n")


def reported(
    name: str, workload: str, options: Sequence[str], *settings: str, minutes: float = 1.0, steps: int = 1
) -> Run:
    """Makes a run that prints vLLM's start and sleep, with a cache of its own in the folder of results."""
    run = step_run(name, workload, *settings, options=options, minutes=minutes, steps=steps)
    return varied(with_environment(run, VLLM_CACHE_ROOT="{out}/vllm_cache"), "report_vllm")


def start(workload: str, options: Sequence[str], settings: Sequence[str], tiny: bool) -> Check:
    remove = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
    warm = reported("warm", workload, options, *settings, minutes=1.5)
    return Check(
        "vllm",
        "Does a second start of vLLM find what the first one has compiled?",
        [
            Run("remove", ["-c", remove, "{out}/vllm_cache"], 0.2),
            reported("cold", workload, options, *settings, minutes=2.5),
            warm,
        ],
        judges.cache_is_hit(compiles=not tiny),
        [Fault("another path of the model", [varied(warm, "moved_config")])],
        needs="vllm",
    )


def sync(
    block: str, workload: str, options: Sequence[str], settings: Sequence[str], nats: float, ranks: int = 1
) -> Check:
    """Returns the check that the engine decodes with the trained weights, also with LoRA."""
    settings = [*settings, "health.max_parity=null"]  # the judge of the check compares instead of the trainer
    parallel = ["zero=stage3", "rollout.vllm.tensor_parallel=2"] if ranks > 1 else []
    kinds = {"plain": (), "lora": ("actor.lora.rank=8", "actor.lora.lr=1e-2")}
    runs = {
        name: step_run(
            name,
            workload,
            *settings,
            *parallel,
            *how,
            options=options,
            steps=2,
            minutes=1.2 * ranks,
            ranks=ranks,
        )
        for name, how in kinds.items()
    }
    return Check(
        block,
        "Does vLLM decode with the trained weights after each update, also with LoRA?",
        list(runs.values()),
        judges.weights_follow(nats),
        [Fault("a layer is stale", [varied(runs["plain"], "stale_layer")])],
        needs="vllm",
    )
