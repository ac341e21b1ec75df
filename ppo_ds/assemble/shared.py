"""Builds parts that all stages have: number of steps, layouts, averaged weights, banner lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ppo_ds.compute import matmul
from ppo_ds.config.schema import LORA_FACTOR, Config, TrainedConfig, learning_rate
from ppo_ds.config.sections.models import EmaConfig
from ppo_ds.config.sections.run import RunConfig
from ppo_ds.config.warnings import slow_bf16
from ppo_ds.distributed.threads import computes_bf16
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.finetune.optimizer_step import OptimizerStep
from ppo_ds.models.size import stored_parameters
from ppo_ds.run.performance import measured_capacity, update_cost
from ppo_ds.run.stage import RunContext


def loading(context: RunContext, name: str, path: str | None, revision: str | None) -> None:
    """Shows that the model ``name`` is being loaded, with its number of parameters."""
    if context.world.is_main and path is not None:
        count = stored_parameters(path, revision)
        size = f", {short_count(count)} parameters" if count else ""
        context.banner.starting(f"loading the {name}: {path}{size}")


def short_count(count: int) -> str:
    """Formats a count with three significant digits: 1.54B, 494M, 106k."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def training_steps(run: RunConfig, rows: int, rows_per_step: int) -> int:
    """Returns the number of training steps: run.steps, or the steps of run.epochs passes over ``rows``."""
    return run.steps or math.ceil((run.epochs or 0) * rows / rows_per_step)


def choose_layout(
    layout: str, name: str, model: TrainedModel | FrozenModel, device: torch.device
) -> list[str]:
    """Sets the layout of a model's forwards (memory.layout) and returns lines for the banner.

    ``name`` is the model's name in these lines. All ranks must call this.
    """
    choice = model.module.choose_layout(layout, device, model)
    on_gpu = device.type == "cuda"
    if choice.unexpected:
        return [f"warning    memory.layout={layout}: the {name}'s rows are padded: {choice.reason}"]
    if choice.packed and not choice.kernel and on_gpu:
        return [
            f"warning    memory.layout=packed: no kernel supports the {name}'s heads: attention is "
            "computed one sequence after the other"
        ]
    how = "packed" if choice.packed else f"padded: {choice.reason}"
    return [f"layout     {name} {how}"] if on_gpu else []


def all_packed(*models: TrainedModel | FrozenModel | None) -> bool:
    """Returns whether all given models use packed rows; if so, forwards are planned without padding."""
    return all(model.module.packed for model in models if model is not None)


def finetuning_step(
    context: RunContext,
    name: str,
    prefix: str,
    model: TrainedModel,
    body: Any,
    ema: WeightCopy | None,
    section: EmaConfig,
) -> OptimizerStep:
    """Builds the optimizer step of a supervised stage; ``body`` is the Hugging Face model in ``model``.

    ``prefix`` is the prefix of the metrics of the step, such as sft.
    """
    capacity = measured_capacity(context.world, body.dtype)
    cost, decay = update_cost(model, body), section.decay or 0.0
    return OptimizerStep(context, name, prefix, model, ema, decay, capacity, cost)


def eval_weights(ema: WeightCopy | None, wanted: bool) -> Callable[[], AbstractContextManager[None]]:
    """Returns ``ema.swapped``, which swaps in the averaged weights, if ``wanted``, otherwise nullcontext."""
    return ema.swapped if ema is not None and wanted else nullcontext


def evaluated_rows(config: Config, held_out: Sized | None) -> int:
    return 0 if held_out is None else min(len(held_out), config.eval.max_prompts or len(held_out))


# ---- lines of the start-up banner


def machine(world: World) -> list[str]:
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    onednn = world.device.type == "cpu" and matmul.library() == "onednn"
    return [
        f"{world.size} rank(s) on {device}; torch {torch.__version__}",
        f"threads    {world.threads}" + ("; oneDNN multiplies large fp32 matrices" if onednn else ""),
    ]


def trained_model(name: str, path: str | None, role: TrainedConfig) -> str:
    """Returns the banner line on a trained model; its initial weights are from ``path``."""
    optim, rate = role.optim, learning_rate(role)
    factor = f" ({LORA_FACTOR:g} x optim.lr)" if role.lora.rank and role.lora.lr == "auto" else ""
    engine = f"{role.model.dtype}  ZeRO-{role.zero.stage}"
    return f"{name:10} {path}  {engine}  learning rate {rate:g}{factor}, {optim.schedule}"


# Usual learning rates of full training: (upper limit of the number of parameters, rate). Sources:
# docs/training.md, "Learning rates".
USUAL_RATES = {
    ("ppo", "actor"): {4e8: 1e-5, 4e9: 1e-6, math.inf: 5e-7},
    ("ppo", "critic"): {4e8: 5e-5, math.inf: 5e-6},
    ("sft", "actor"): {4e8: 1e-4, 4e9: 2e-5, 20e9: 1e-5, math.inf: 5e-6},
    ("reward_model", "scorer"): {4e8: 3e-5, 4e9: 1e-5, 20e9: 5e-6, math.inf: 3e-6},
}
SMALLEST = 1e8  # parameters; smaller models need higher rates, which depend on the task
UNUSUAL = 20.0  # ratio to the usual rate above which there is a warning


def training_notes(stage: str, name: str, role: TrainedConfig, model: TrainedModel) -> list[str]:
    """Returns a line on a model's adapters, and warnings on its learning rate and on the number of ranks."""
    trained, parameters = parameter_counts(model.module)
    lines = []
    if role.lora.rank:
        lines.append(
            f"lora       {name}: rank {role.lora.rank}, trainable parameters: {trained:,} of {parameters:,} "
            f"({trained / parameters:.2%})"
        )
    if name != "critic":
        lines += ranks_without_gpus(trained, model.world)
    return lines + unusual_rate(stage, name, role, parameters)


def ranks_without_gpus(trained: int, world: World) -> list[str]:
    """Returns a warning if several ranks share the CPU of a machine to train ``trained`` parameters.

    On two cores with 134.5 million parameters, one rank with two threads needed less memory than two ranks.
    It was 1.6 times as fast with 256 tokens per rank and optimizer step, and equally fast with 1,024
    (docs/dev/performance.md).
    """
    ranks, cores = world.threads.ranks, world.threads.cores
    if world.device.type != "cpu" or ranks == 1 or trained < SMALLEST:
        return []
    return [
        f"warning    {ranks} ranks share one CPU, and each has all {trained / 1e6:,.0f} million gradients; "
        f"one rank with run.threads={cores} needs less memory, and less time if minibatches are small"
    ]


def unusual_rate(stage: str, name: str, role: TrainedConfig, parameters: int) -> list[str]:
    """Returns a warning if a learning rate is far from the usual one; none for models below SMALLEST."""
    if parameters < SMALLEST:
        return []
    usual = next(rate for limit, rate in USUAL_RATES[stage, name].items() if parameters < limit)
    usual *= LORA_FACTOR if role.lora.rank else 1.0
    rate = learning_rate(role)
    if usual / UNUSUAL < rate < usual * UNUSUAL:
        return []
    of_adapters = role.lora.rank and role.lora.lr not in (None, "auto")
    factor = f"{rate / usual:.3g} times" if rate > usual else f"1/{usual / rate:.3g} of"
    kind = "adapters" if role.lora.rank else "full training"
    return [
        f"warning    {name}.{'lora' if of_adapters else 'optim'}.lr: the learning rate {rate:g} is {factor} "
        f"the usual {usual:g} for {kind} of a model with {parameters / 1e9:.2g} billion parameters at "
        f"stage={stage} (docs/training.md, Learning rates)"
    ]


def slow_dtypes(config: Config, world: World) -> list[str]:
    return slow_bf16(config, computes_bf16()) if world.device.type == "cpu" else []
