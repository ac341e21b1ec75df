"""A model of a checkpoint into a plain module: no engine, no process group, no GPU, one parameter at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ppo_ds.engine.checkpoint.files import expect_below
from ppo_ds.engine.checkpoint.state import FORMAT
from ppo_ds.engine.master_weights import WEIGHT
from ppo_ds.errors import UserError


@torch.no_grad()
def read_weights(module: nn.Module, checkpoint: Path, role: str, *, shadow: str | None = None) -> None:
    """Give ``module`` the weights of ``checkpoint/role`` (or its second set ``checkpoint/shadow``), as the engine's own module had them.

    ``module`` is what the engine was given at its start: frozen weights stay as they are.
    """
    about = _about(checkpoint / role / "model.json")
    shards = about["shards"] if shadow is None else _about(checkpoint / shadow / "shadow.json")["shards"]
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    _expect_names(trained, shards, checkpoint)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(
            getattr(torch, about["dtype"])
        )  # engines cast also what a model would keep in fp32
    for name, value in _weights(checkpoint / (shadow or role), shards):
        if value.shape != trained[name].shape:
            raise _another_model(
                checkpoint, f"{name} is {list(value.shape)} there and {list(trained[name].shape)} here"
            )
        trained[name].copy_(value)
    state = module.state_dict()
    for name, value in load_file(checkpoint / role / "buffers.safetensors").items():
        state[name].copy_(value)


def _weights(directory: Path, shards: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(directory / file, framework="pt"))
            for file in sorted(set(shards.values()))
        }
        for name, file in shards.items():
            yield name, files[file].get_tensor(f"{WEIGHT}/{name}")


def _about(file: Path) -> dict[str, Any]:
    about = json.loads(file.read_text(encoding="utf-8"))
    if about["format"] != FORMAT:
        raise UserError(
            f"{file.parent}: has format {about['format']}, this version reads {FORMAT}: use the version that wrote it"
        )
    expect_below(about["shards"].values(), file)
    return about


def _expect_names(trained: Mapping[str, nn.Parameter], shards: Mapping[str, str], checkpoint: Path) -> None:
    lacking, unknown = (
        [name for name in trained if name not in shards],
        [name for name in shards if name not in trained],
    )
    if lacking or unknown:
        what = "; ".join(
            [f"it lacks {name}" for name in lacking[:3]]
            + [f"it has {name}, which the model lacks" for name in unknown[:3]]
        )
        raise _another_model(checkpoint, f"{what} ({len(lacking) + len(unknown)} in all)")


def _another_model(checkpoint: Path, what: str) -> UserError:
    return UserError(
        f"{checkpoint}: the model that it began with is another one now: {what}; put the old one back"
    )
