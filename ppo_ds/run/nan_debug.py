"""Replays rows of an optimizer step one at a time and records the tensors that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.types import Sequences

# a model, and a function that returns its loss for a micro-batch as the first item
Replayed = tuple[TrainedModel, Callable[[Any], tuple[Any, ...]]]


@dataclass
class ReplayedRow:
    """Result of replaying a single row of an optimizer step."""

    position: int  # position in the minibatch
    rank: int | None  # the rank that replayed it, or without a replay, that generated it
    losses: dict[str, float] = field(default_factory=dict)  # model -> the row's part of the step's loss
    first: str | None = None  # name of the first tensor that was not finite


def replay_rows(
    models: Mapping[str, Replayed], plan: Sequence[Tensor], micros: Sequence[Sequences], world: World
) -> list[ReplayedRow]:
    """Runs forward and backward of the models row by row; returns the rows of all ranks, by position.

    All ranks must call this. ``plan`` holds the positions of this rank's rows in the minibatch, ``micros``
    the rows themselves. Gradients are dropped; weights, optimizers and counters do not change.
    """
    rows = [ReplayedRow(int(position), world.rank) for position in plan]
    for name, (model, compute_loss) in models.items():
        with nonfinite_tensors(name, model) as found:
            for micro, row in zip(micros, rows, strict=True):
                loss, *_ = compute_loss(micro)
                _note(found, f"loss of the {name}", loss.detach())
                model.backward(loss, last=row is rows[-1])
                row.losses[name] = float(loss.detach()) / world.size
                row.first, found[:] = row.first or next(iter(found), None), []
        model.skip(overflow=False)
    return sorted((row for part in world.gather_objects(rows) for row in part), key=lambda row: row.position)


@contextmanager
def nonfinite_tensors(name: str, model: TrainedModel) -> Iterator[list[str]]:
    """Yields a list that collects the names of ``model``'s non-finite outputs and gradients in the block.

    They are in the order of computation. The outputs are those of leaf modules and of the whole model. Each
    forward should have a single row or pair, since the names do not tell rows apart.
    """
    found: list[str] = []

    def note_output(module: Any, inputs: Any, output: Any, what: str) -> None:
        for leaf in tree_leaves(output):
            if torch.is_tensor(leaf) and leaf.is_floating_point():
                _note(found, what, leaf.detach())

    with ExitStack() as hooks:
        for path, module in model.module.named_modules():
            if not path or not any(module.children()):
                hook = partial(note_output, what=f"output of {name}.{path}".removesuffix("."))
                hooks.callback(module.register_forward_hook(hook).remove)
        for path, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                hook = partial(_note, found, f"gradient of {name}.{path}")
                hooks.callback(parameter.register_hook(hook).remove)
        yield found


def _note(found: list[str], what: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        found.append(what)
