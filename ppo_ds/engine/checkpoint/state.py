"""A trained model on disk: safetensors by parameter name and one JSON file. No pickles, no trace of ZeRO or of the number of ranks.

model.json               counters, and which shard holds which parameter
shard-00000.safetensors  weight/<name>, exp_avg/<name>, exp_avg_sq/<name>: fp32, whole
buffers.safetensors      the module's persistent buffers

A second set of its weights (engine/weight_copy.py) is stored alike: weight/<name> alone, and the shards' index as shadow.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.files import agree, expect_below, together, write_json, write_tensors
from ppo_ds.engine.hybrid import GATHER_ELEMENTS
from ppo_ds.engine.master_weights import PARTS, WEIGHT, MasterWeights
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError

FORMAT = 1
SHARD_BYTES = 2 * 1024**3


class ShardWriter:
    """Collects parameters into shards, rank after rank, and lets all ranks write theirs at the same time when each has a full one."""

    def __init__(self, directory: Path, world: World, parts: Sequence[str]):
        self.index: dict[str, str] = {}  # parameter -> file, the same on every rank
        self.written: list[Path] = []  # by this rank
        self.error: OSError | None = (
            None  # kept until all ranks can hear of it: raised at once, the others would hang
        )
        self._directory, self._world, self._parts = directory, world, parts
        self._shard, self._bytes = 0, 0
        self._held: dict[str, Tensor] = {}
        self._file = ""  # where they go

    def add(self, name: str, masters: MasterWeights) -> None:
        """Collective."""
        if self._bytes >= SHARD_BYTES:
            self._shard, self._bytes = self._shard + 1, 0
            if self._shard % self._world.size == 0:
                self.flush()
        self.index[name] = f"shard-{self._shard:05d}.safetensors"
        for part in self._parts:
            whole = masters.get(name, part)
            self._bytes += whole.nbytes
            if self._shard % self._world.size == self._world.rank:
                self._held[f"{part}/{name}"] = whole.cpu()
                self._file = self.index[name]

    def flush(self) -> None:
        """Write what this rank holds. Not a collective."""
        if self._held and self.error is None:
            path = self._directory / self._file
            try:
                write_tensors(path, self._held)
                self.written.append(path)
            except OSError as error:
                self.error = error
        self._held = {}


def model_bytes(model: TrainedModel) -> int:
    """How much ``save_model`` writes, but for the JSON."""
    trained, _ = parameter_counts(model.module)
    return 4 * len(PARTS) * trained + sum(buffer.nbytes for buffer in _buffers(model.module).values())


def shadow_bytes(shadow: WeightCopy) -> int:
    """The same for ``save_shadow``."""
    return 4 * parameter_counts(shadow.model.module)[0]


def save_model(model: TrainedModel, directory: Path) -> list[Path]:
    """Collective. Returns the files that this rank wrote; all are complete when it returns."""
    masters = MasterWeights(model)
    writer = _write_shards(masters, directory, model.world, PARTS)
    return writer.written + together(
        model.world, lambda: _write_rest(model, masters, writer.index, directory)
    )


def save_shadow(shadow: WeightCopy, directory: Path) -> list[Path]:
    """The same for a second set of weights."""
    world = shadow.model.world
    with shadow.exchanged() as masters:
        writer = _write_shards(masters, directory, world, [WEIGHT])
    about = directory / "shadow.json"
    together(
        world,
        lambda: write_json(about, {"format": FORMAT, "shards": writer.index}) if world.is_main else None,
    )
    return writer.written + ([about] if world.is_main else [])


def _write_shards(masters: MasterWeights, directory: Path, world: World, parts: Sequence[str]) -> ShardWriter:
    together(world, lambda: directory.mkdir(parents=True, exist_ok=True))
    writer = ShardWriter(directory, world, parts)
    for name in masters.parameters:
        writer.add(name, masters)
    writer.flush()
    agree(world, writer.error)
    return writer


def _write_rest(
    model: TrainedModel, masters: MasterWeights, index: dict[str, str], directory: Path
) -> list[Path]:
    if not model.world.is_main:
        return []
    about = {
        "format": FORMAT,
        "steps": model.steps,
        "zero_stage": model.zero_stage,
        "world_size": model.world.size,
        "dtype": str(next(model.module.parameters()).dtype).removeprefix("torch."),
        "adam_steps": masters.get_steps(),
        "loss_scaler": masters.get_scaler(),
        "settings": model.settings,
        "shards": index,
    }
    write_json(directory / "model.json", about)
    write_tensors(
        directory / "buffers.safetensors",
        {name: b.detach().cpu().clone() for name, b in _buffers(model.module).items()},
    )
    return [directory / "model.json", directory / "buffers.safetensors"]


def load_model(model: TrainedModel, directory: Path) -> None:
    """Collective: put ``model`` where the saved one was, whatever its ZeRO stage and number of ranks. All ranks read ``directory``."""
    masters = MasterWeights(model)
    about = together(model.world, lambda: _read_about(masters, directory / "model.json"))
    together(
        model.world, lambda: _expect_settings(model, about.get("settings", {}), directory)
    )  # older files have none
    buffers = together(model.world, lambda: load_file(directory / "buffers.safetensors"))
    together(model.world, lambda: _read_masters(masters, about["shards"], directory, PARTS))
    masters.set_steps(about["adam_steps"])
    masters.set_scaler(about["loss_scaler"])
    masters.refresh()
    with torch.no_grad():
        for name, buffer in _buffers(model.module).items():
            buffer.copy_(buffers[name])
    model.steps = about["steps"]


def load_shadow(shadow: WeightCopy, directory: Path) -> None:
    """Collective: the second set of weights as it was saved. The model's own stay as they are."""
    world = shadow.model.world
    about = together(world, lambda: _read_about(shadow.masters, directory / "shadow.json"))
    with shadow.exchanged() as masters:
        together(world, lambda: _read_masters(masters, about["shards"], directory, [WEIGHT]))


def _read_about(masters: MasterWeights, file: Path) -> dict[str, Any]:
    directory = file.parent
    about = json.loads(file.read_text(encoding="utf-8"))
    if about["format"] != FORMAT:
        raise UserError(
            f"run.resume: {directory} has format {about['format']}, this version reads {FORMAT}: use the version that wrote it"
        )
    expect_below(about["shards"].values(), file)
    missing = [name for name in masters.parameters if name not in about["shards"]]
    unknown = [name for name in about["shards"] if name not in masters.parameters]
    if missing or unknown:
        what = "; ".join(
            [f"it lacks {name}" for name in missing[:3]]
            + [f"it has {name}, which the model lacks" for name in unknown[:3]]
        )
        raise UserError(
            f"run.resume: {directory} is of another model: {what} ({len(missing) + len(unknown)} in all): give the model it was made with"
            f"{_adapters_hint(missing + unknown)}"
        )
    return about


def _expect_settings(model: TrainedModel, saved: dict[str, float], directory: Path) -> None:
    for key, value in model.settings.items():
        if saved.get(key, value) != value:
            raise UserError(
                f"run.resume: {directory} was made with {key}={saved[key]:g}, this run has {value:g}: keep it"
            )


def _adapters_hint(names: list[str]) -> str:
    return ", with its lora.rank and lora.targets" if any(".lora_" in name for name in names) else ""


def _read_masters(
    masters: MasterWeights, index: dict[str, str], directory: Path, parts: Sequence[str]
) -> None:
    with ExitStack() as stack:
        shards = {
            file: stack.enter_context(safe_open(directory / file, framework="pt"))
            for file in sorted(set(index.values()))
        }
        for name in masters.parameters:
            shard = shards[index[name]]
            shape = shard.get_slice(f"{WEIGHT}/{name}").get_shape()
            if shape != masters.shape(name):
                raise UserError(
                    f"run.resume: {directory} is of another model: {name} is {shape} there and {masters.shape(name)} here{_adapters_hint([name])}"
                )
            for part in parts:
                masters.set(name, part, shard.get_tensor(f"{part}/{name}"))


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """The persistent ones: those that ``state_dict`` lists."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


@torch.no_grad()
def consolidated(model: TrainedModel) -> dict[str, Tensor] | None:
    """Collective: the weights as ``module.state_dict()`` would give them on one device, in the model's dtype, on the CPU of rank 0.

    None on the other ranks. Tied weights are one tensor under two names, and nothing else shares memory.
    """
    model.settle()
    copies: dict[int, Tensor] = {}
    chunk: list[nn.Parameter] = []
    elements = 0
    for parameter in model.module.parameters():
        chunk.append(parameter)
        elements += getattr(parameter, "ds_numel", parameter.numel())
        if elements >= GATHER_ELEMENTS:
            _copy_whole(model, chunk, copies)
            chunk, elements = [], 0
    if chunk:
        _copy_whole(model, chunk, copies)
    if not model.world.is_main:
        return None
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    return {
        name: copies[id(parameters[name])] if name in parameters else tensor.detach().to("cpu", copy=True)
        for name, tensor in model.module.state_dict().items()
    }


def _copy_whole(model: TrainedModel, parameters: list[nn.Parameter], copies: dict[int, Tensor]) -> None:
    with deepspeed.zero.GatheredParameters(parameters, enabled=model.zero_stage == 3):
        if model.world.is_main:
            for parameter in parameters:
                copies[id(parameter)] = parameter.detach().to("cpu", copy=True).contiguous()
