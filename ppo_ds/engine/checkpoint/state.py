"""Saves and loads a trained model: safetensors by parameter name and a JSON file, without pickle.

model.json               counters and settings, and the index of the shards (engine/checkpoint/shards.py)
shard-00000.safetensors  weight/<name>, exp_avg/<name>, exp_avg_sq/<name>: fp32, whole
buffers.safetensors      the module's persistent buffers

A weight copy (engine/weight_copy.py) has shards with weight/<name> only, and the index shadow.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ppo_ds.engine.checkpoint.files import on_all_ranks, on_main_rank, write_json, write_tensors
from ppo_ds.engine.checkpoint.shards import (
    FORMAT,
    INDEX_OF_COPY,
    INDEX_OF_MODEL,
    read_index,
    read_shards,
    write_shards,
)
from ppo_ds.engine.gather import GATHER_ELEMENTS, chunked
from ppo_ds.engine.master_weights import PARTS, WEIGHT, MasterWeights, opened_masters
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError
from ppo_ds.models.quantized import plain_weight, whole_numel

KEY = "run.resume: "  # prefix of error messages while loading


def model_bytes(model: TrainedModel) -> int:
    """Returns the total size in bytes of the files that ``save_model`` writes, without the JSON file."""
    trained, _ = parameter_counts(model.module)
    return 4 * len(PARTS) * trained + sum(buffer.nbytes for buffer in _buffers(model.module).values())


def weight_copy_bytes(copy: WeightCopy) -> int:
    """Returns the total size in bytes of the files that ``save_weight_copy`` writes, without the JSON."""
    return 4 * parameter_counts(copy.model.module)[0]


def exported_bytes(models: Mapping[str, TrainedModel], copies: Mapping[str, WeightCopy]) -> int:
    """Returns the size in bytes of the weights that ``Stage.export`` writes."""
    exported = [*models.values(), *(copy.model for name, copy in copies.items() if name == "ema")]
    return sum(whole_numel(p) * p.element_size() for model in exported for p in model.module.parameters())


def save_model(model: TrainedModel, directory: Path) -> list[Path]:
    """Saves a model to the disk and returns the files that this rank wrote. All ranks must call this."""
    world = model.world
    with opened_masters(model) as masters:
        shards, written = write_shards(masters, directory, world, PARTS)
    index = {
        "format": FORMAT,
        "steps": model.steps,
        "zero_stage": model.zero_stage,
        "world_size": world.size,
        "dtype": str(next(model.module.parameters()).dtype).removeprefix("torch."),
        "adam_steps": masters.get_steps(),
        "loss_scaler": masters.get_scaler(),
        "settings": model.settings,
        "shards": shards,
    }
    index_file, buffers_file = directory / INDEX_OF_MODEL, directory / "buffers.safetensors"
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in _buffers(model.module).items()}
    on_main_rank(world, lambda: write_json(index_file, index))
    on_main_rank(world, lambda: write_tensors(buffers_file, buffers))
    return written + ([index_file, buffers_file] if world.is_main else [])


def save_weight_copy(copy: WeightCopy, directory: Path) -> list[Path]:
    """Saves a weight copy; otherwise like ``save_model``. All ranks must call this."""
    world = copy.model.world
    with copy.exchanged() as masters:
        shards, written = write_shards(masters, directory, world, [WEIGHT])
    index_file = directory / INDEX_OF_COPY
    on_main_rank(world, lambda: write_json(index_file, {"format": FORMAT, "shards": shards}))
    return written + ([index_file] if world.is_main else [])


def load_model(model: TrainedModel, directory: Path) -> None:
    """Restores a model. All ranks must call this.

    Each rank reads only the elements that it keeps. The ZeRO stage and the number of ranks may differ from
    the saved run's. Raises UserError on all ranks if the checkpoint contains another model or has other
    settings.
    """
    world, parameters = model.world, MasterWeights(model).parameters
    index = on_all_ranks(world, lambda: read_index(directory / INDEX_OF_MODEL, parameters, key=KEY))
    saved = index["settings"]
    for key, value in model.settings.items():
        if saved.get(key, value) != value:
            raise UserError(
                f"{KEY}{directory} was made with {key}={saved[key]:g}, this run has {value:g}: keep it"
            )
    buffers = on_all_ranks(world, lambda: load_file(directory / "buffers.safetensors"))
    with opened_masters(model, store=True) as masters:
        on_all_ranks(world, lambda: _read_masters(masters, index["shards"], directory, PARTS))
    masters.set_steps(index["adam_steps"])
    masters.set_scaler(index["loss_scaler"])
    masters.refresh()
    with torch.no_grad():
        for name, buffer in _buffers(model.module).items():
            buffer.copy_(buffers[name])
    model.steps = index["steps"]  # and therefore the position in the schedule


def load_weight_copy(copy: WeightCopy, directory: Path) -> None:
    """Restores a weight copy; the weights of the model do not change. All ranks must call this."""
    world, parameters = copy.model.world, copy.masters.parameters
    index = on_all_ranks(world, lambda: read_index(directory / INDEX_OF_COPY, parameters, key=KEY))
    with copy.exchanged() as masters:
        on_all_ranks(world, lambda: _read_masters(masters, index["shards"], directory, [WEIGHT]))


def _read_masters(
    masters: MasterWeights, shards: dict[str, str], directory: Path, parts: Sequence[str]
) -> None:
    shapes = {name: masters.shape(name) for name in masters.parameters}
    ranges = {name: masters.local_range(name) for name in masters.parameters}
    for name, part, values in read_shards(directory, shards, shapes, ranges, parts, key=KEY):
        masters.set_local(name, part, values)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the persistent buffers, which are the buffers in ``state_dict``."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in parameters
    }


@torch.no_grad()
def consolidated(model: TrainedModel, gather_elements: int = GATHER_ELEMENTS) -> dict[str, Tensor] | None:
    """Returns the whole ``module.state_dict()`` on the CPU of rank 0, and None on other ranks.

    All ranks must call this. Tensors have the model's dtype. Only tied weights share memory.
    """
    model.restore_weights()
    copies: dict[int, Tensor] = {}
    for chunk in chunked(model.module.parameters(), whole_numel, gather_elements):
        with deepspeed.zero.GatheredParameters(chunk, enabled=model.zero_stage == 3):
            if model.world.is_main:
                for parameter in chunk:
                    whole = plain_weight(parameter).detach()
                    copies[id(parameter)] = whole.to("cpu", copy=True).contiguous()
    if not model.world.is_main:
        return None
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    return {
        name: copies[id(parameters[name])] if name in parameters else tensor.detach().to("cpu", copy=True)
        for name, tensor in model.module.state_dict(keep_vars=True).items()
    }
