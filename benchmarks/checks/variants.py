"""Runs a script with changes: counters and reports that a check reads, and mistakes that it must detect.

python benchmarks/checks/variants.py NAME[,NAME...] SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if ROOT / "benchmarks" not in Path(entry or ".").resolve().parents),
]


GIB = 2**30
RANK = os.environ.get("RANK", "0")


# ---- counters and reports


def count_waits() -> None:
    """Counts the calls that synchronize the device in forwards and backwards of trained models.

    At the end of a step the trainer synchronizes for its times, and before a collective of the CPU for the
    time that it waits. Under ZeRO-3 DeepSpeed does so in optimizer steps and for gathers of whole weights.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    from ppo_ds.distributed.exit import on_exit
    from ppo_ds.engine.trained import TrainedModel

    callers: Counter[str] = Counter()
    within: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def synchronize(*args: Any, **kwargs: Any) -> Any:
            if within:
                callers[f"{within[-1]}: {sys._getframe(1).f_code.co_filename}"] += 1
            return function(*args, **kwargs)

        return synchronize

    def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def computation(*args: Any, **kwargs: Any) -> Any:
            within.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                within.pop()

        return computation

    TrainedModel.__call__ = marked("forward", TrainedModel.__call__)  # type: ignore[method-assign]
    TrainedModel.backward = marked("backward", TrainedModel.backward)  # type: ignore[method-assign]
    torch.cuda.synchronize = counted(torch.cuda.synchronize)
    accelerator = get_accelerator()
    accelerator.synchronize = counted(accelerator.synchronize)
    # one string with its line end, so that the lines of two ranks are not mixed
    on_exit(
        lambda: print(
            f"\nrank {RANK}: synchronizations of the device: {callers.total()} {dict(callers)}\n",
            end="",
            flush=True,
        )
    )


def narrow_graphs() -> None:
    """Records graphs of 64, 128, 192, ... columns."""
    from ppo_ds.rollout import continuous_batch

    continuous_batch.graph_columns = lambda used: -(-used // 64) * 64


def report_vllm() -> None:
    """Prints the seconds of vLLM's start, the folders of its cache, and the free memory when it sleeps."""
    import torch

    from ppo_ds.rollout import vllm

    start = vllm.start_engine

    def free() -> str:
        return f"{torch.cuda.mem_get_info()[0] / GIB:.3f} GiB free"

    def started(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        engine = start(*args, **kwargs)
        cache = Path(os.environ["VLLM_CACHE_ROOT"])
        found = sorted(str(path.relative_to(cache)) for path in cache.glob("[pt]*/*"))
        print(f"vllm start: {time.monotonic() - began:.1f} s; cache: {found}", flush=True)
        sleep = engine.sleep

        def reported(*args: Any, **kwargs: Any) -> None:
            awake = free()
            sleep(*args, **kwargs)
            print(f"vllm awake: {awake}; asleep: {free()}", flush=True)

        engine.sleep = reported
        return engine

    vllm.start_engine = started


# ---- mistakes


def scaled_loss() -> None:
    """Makes gradients 20 percent too large."""
    _scale_losses(1.2)


def silent_rank() -> None:
    """Loses the rows of rank 1."""
    _scale_losses(0.0 if RANK == "1" else 1.0)


def _scale_losses(factor: float) -> None:
    from ppo_ds.engine.trained import TrainedModel

    backward = TrainedModel.backward
    TrainedModel.backward = lambda self, loss, last: backward(self, factor * loss, last)  # type: ignore


def wrong_logprobs() -> None:
    """Makes the log-probs of generation 0.05 nats too high."""
    from ppo_ds.rollout import hf, static

    truncate = static.truncate_at_stop

    def wrong(prompts: Any, responses: Any, logprobs: Any, **how: Any) -> Any:
        return truncate(prompts, responses, logprobs + 0.05, **how)

    static.truncate_at_stop = hf.truncate_at_stop = wrong


def waiting() -> None:
    """Synchronizes the device at each forward of an engine, as DeepSpeed's throughput timer does."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine

    forward = DeepSpeedEngine.forward

    def waits(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().synchronize()
        return forward(*args, **kwargs)

    DeepSpeedEngine.forward = waits


def leak() -> None:
    """Keeps 32 MiB at each optimizer step."""
    import torch
    from deepspeed.accelerator import get_accelerator

    kept: list[Any] = []
    device = get_accelerator().current_device_name()
    _at_each_update(lambda: kept.append(torch.ones(2**23, device=device)))


def _at_each_update(also: Callable[[], Any]) -> None:
    from ppo_ds.engine.trained import TrainedModel

    step = TrainedModel.step

    def changed(self: TrainedModel) -> Any:
        also()
        return step(self)

    TrainedModel.step = changed  # type: ignore[method-assign]


def no_watchdog() -> None:
    """Lets no rank notice that another one has died."""
    from ppo_ds.distributed.watchdog import Watchdog

    Watchdog.start = Watchdog.connect  # type: ignore[method-assign]


def lost_weights() -> None:
    """Resumes without the weights and optimizer states of the checkpoint."""
    from ppo_ds.engine.checkpoint import checkpoints

    checkpoints.load_model = lambda *_: None


def stale_layer() -> None:
    """Lets vLLM ignore a decoder layer once the actor has been trained."""
    from ppo_ds.engine.hybrid import HybridActor
    from ppo_ds.rollout.vllm import VLLMGenerator

    weights, with_tied, steps = HybridActor.weights, VLLMGenerator._with_tied, [0]

    def sent(actor: HybridActor) -> Any:
        steps.append(actor.engine.global_steps)
        return weights(actor)

    def received(*arguments: Any) -> Iterator[Any]:
        for name, tensor in with_tied(*arguments):
            if not (steps[-1] > 0 and name.startswith("model.layers.1.")):
                yield name, tensor

    HybridActor.weights = sent  # type: ignore[method-assign]
    VLLMGenerator._with_tied = received  # type: ignore[method-assign]


def moved_config() -> None:
    """Gives vLLM the model's config in a folder with another name at each start."""
    import tempfile

    from ppo_ds.rollout import vllm

    def moved(config: Any) -> Path:
        folder = Path(tempfile.mkdtemp(dir=Path(os.environ["VLLM_CACHE_ROOT"]) / "ppo_ds"))
        (folder / "config.json").write_text(config.to_json_string())
        return folder

    vllm.config_folder = moved


def main() -> None:
    names, script, *arguments = sys.argv[1:]
    from launch.process import prepare_environment

    prepare_environment(verbose=False, trains=True, fixed_segments="rollout.backend=vllm" in arguments)
    for name in names.split(","):
        globals()[name]()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
