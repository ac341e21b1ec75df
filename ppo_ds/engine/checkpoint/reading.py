"""Reads a model from a checkpoint into a plain module, without an engine, a process group or a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from ppo_ds.engine.checkpoint.shards import INDEX_OF_COPY, INDEX_OF_MODEL, read_index, read_shards
from ppo_ds.engine.master_weights import WEIGHT


@torch.no_grad()
def read_weights(module: nn.Module, checkpoint: Path, role: str, *, weight_copy: str | None = None) -> None:
    """Loads the weights of ``checkpoint/role``, or of ``checkpoint/weight_copy``, into ``module``.

    ``module`` must be built like the saved engine's module. All floating-point weights of ``module`` are cast
    to the dtype of the saved module, even frozen weights, which the checkpoint does not contain.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    index = read_index(checkpoint / role / INDEX_OF_MODEL, trained)
    shards = index["shards"]
    if weight_copy is not None:
        shards = read_index(checkpoint / weight_copy / INDEX_OF_COPY, trained)["shards"]
    for parameter in module.parameters():
        # engines cast all parameters but codes of 4 bits, even those that a model would keep in fp32
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, index["dtype"]))
    shapes = {name: parameter.shape for name, parameter in trained.items()}
    whole = {name: slice(0, parameter.numel()) for name, parameter in trained.items()}
    for name, _, values in read_shards(checkpoint / (weight_copy or role), shards, shapes, whole, [WEIGHT]):
        trained[name].copy_(values.view(shapes[name]))
    state = module.state_dict(keep_vars=True)
    for name, value in load_file(checkpoint / role / "buffers.safetensors").items():
        state[name].copy_(value)
