"""Replays rows of an optimizer step one at a time and records the tensors that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.types import Sequences


@dataclass
class ReplayedRow:
    """Result of replaying a single row of an optimizer step."""

    position: int  # position in the minibatch
    rank: int  # the rank that replayed it
    losses: dict[str, float] = field(default_factory=dict)  # model -> the row's part of the step's loss
    first: str | None = None  # name of the first tensor that was not finite


class CheckedOutput(NamedTuple):
    """The numbers of a model's output that a replay checks."""

    label: str  # format string that names one number by its column, such as "log-prob of token {}"
    numbers: Callable[[Any], Tensor]  # gets the tensor of these numbers, [b,columns]


def replay_rows(
    name: str,
    model: TrainedModel,
    result: CheckedOutput,
    compute_loss: Callable[[Any], tuple[Any, ...]],
    micros: Sequence[Sequences],
    rows: list[ReplayedRow],
) -> None:
    """Runs forward and backward of ``model`` on one row at a time and adds the findings to ``rows``.

    A collective. ``micros`` holds a micro-batch for each of ``rows``; ``compute_loss`` returns its loss
    first. Gradients are dropped, so that weights, optimizer and counters do not change.
    """
    with nonfinite_tensors(name, model, result) as found:
        for i, (micro, row) in enumerate(zip(micros, rows, strict=True), start=1):
            loss, *_ = compute_loss(micro)
            _note(found, f"loss of the {name}", loss.detach())
            model.backward(loss, last=i == len(rows))
            row.losses[name] = float(loss.detach()) / model.world.size
            row.first, found[:] = row.first or next(iter(found), None), []
    model.skip(overflow=False)


def gathered_rows(rows: Sequence[ReplayedRow], world: World) -> list[ReplayedRow]:
    """Returns the replayed rows of all ranks in the order of their positions. A collective."""
    return sorted((row for part in world.gather_objects(rows) for row in part), key=lambda row: row.position)


@contextmanager
def nonfinite_tensors(name: str, model: TrainedModel, result: CheckedOutput) -> Iterator[list[str]]:
    """Yields the list of non-finite outputs and gradients of ``model``, in the order of computation."""
    found: list[str] = []

    def note_result(module: Any, inputs: Any, output: Any) -> None:
        """Checks the numbers [1,columns] of a single row, in which every position is attended."""
        bad = (~result.numbers(output).detach().isfinite()).nonzero()
        if len(bad):
            found.append(result.label.format(int(bad[0, -1])))

    def note_output(module: Any, inputs: Any, output: Any, what: str) -> None:
        for leaf in tree_leaves(output):
            if torch.is_tensor(leaf) and leaf.is_floating_point():
                _note(found, what, leaf.detach())

    with ExitStack() as hooks:
        for path, module in model.module.named_modules():
            if not path:
                hooks.callback(module.register_forward_hook(note_result).remove)
            elif not any(module.children()):
                hook = partial(note_output, what=f"output of {name}.{path}")
                hooks.callback(module.register_forward_hook(hook).remove)
        for path, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                hook = partial(_note, found, f"gradient of {name}.{path}")
                hooks.callback(parameter.register_hook(hook).remove)
        yield found


def _note(found: list[str], what: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        found.append(what)
