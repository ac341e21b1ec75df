"""Parts of the construction of every stage: number of steps, layouts, averaged weights, banner lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext

import torch

from ppo_ds.config.schema import Config, TrainedConfig
from ppo_ds.config.sections.models import LoraConfig
from ppo_ds.config.sections.run import RunConfig
from ppo_ds.config.warnings import slow_bf16
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.processor import computes_bf16
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.size import stored_parameters
from ppo_ds.training.stage import RunContext


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
    """Returns the number of training steps: run.steps, or as many as run.epochs passes over ``rows`` need."""
    return run.steps or math.ceil((run.epochs or 0) * rows / rows_per_step)


def choose_layout(
    layout: str, name: str, model: TrainedModel | FrozenModel, device: torch.device
) -> list[str]:
    """Sets the layout of a model's forwards (memory.layout) and returns warnings for the banner.

    ``name`` is the name of the model in the warnings. A collective.
    """
    choice = model.module.choose_layout(layout, device, model)
    lines = []
    if choice.packed and not choice.kernel and device.type == "cuda":
        lines.append(
            f"warning    memory.layout=packed: no kernel supports the {name}'s heads: attention is "
            "computed one sequence after the other"
        )
    if choice.reason is not None:
        lines.append(f"warning    memory.layout={layout}: the {name}'s rows are padded: {choice.reason}")
    return lines


def all_packed(*models: TrainedModel | FrozenModel | None) -> bool:
    """Returns whether all models take packed rows. If so, forwards are planned without padding."""
    return all(model.module.packed for model in models if model is not None)


def eval_weights(ema: WeightCopy | None, wanted: bool) -> Callable[[], AbstractContextManager[None]]:
    """Returns the context manager of evaluations, which swaps in averaged weights if ``wanted``."""
    return ema.swapped if ema is not None and wanted else nullcontext


def evaluated_rows(config: Config, held_out: Sized | None) -> int:
    """Returns the number of held-out rows or pairs in an evaluation."""
    return 0 if held_out is None else min(len(held_out), config.eval.max_prompts or len(held_out))


# ---- lines of the start-up banner


def machine(world: World) -> list[str]:
    """Returns the lines on ranks, device and threads."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return [
        f"{world.size} rank(s) on {device}; torch {torch.__version__}",
        f"threads    {world.threads}",
    ]


def trained_model(name: str, path: str | None, role: TrainedConfig) -> str:
    """Returns the line on a trained model; ``path`` is that of its initial weights."""
    return f"{name:10} {path}  {role.model.dtype}  ZeRO-{role.zero.stage}"


def adapter_note(name: str, lora: LoraConfig, model: TrainedModel) -> list[str]:
    """Returns a line on the number of trained parameters of a model with LoRA."""
    if not lora.rank:
        return []
    n, m = parameter_counts(model.module)
    return [f"lora       {name}: rank {lora.rank}, trainable parameters: {n:,} of {m:,} ({n / m:.2%})"]


def slow_dtypes(config: Config, world: World) -> list[str]:
    """Returns a warning if a model runs in bf16 on a processor that emulates it."""
    return slow_bf16(config, computes_bf16()) if world.device.type == "cpu" else []
