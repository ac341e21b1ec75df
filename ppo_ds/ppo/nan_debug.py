"""Replays an optimizer step row by row and locates the first non-finite tensor. No weight changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ppo.health import NonFiniteStep
from ppo_ds.ppo.learner import Learner
from ppo_ds.training.batching import microbatch_rows
from ppo_ds.types import Experience

# By model: the label of one number of its output, and the function that gets the tensor of these numbers.
RESULTS: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
    "actor": ("log-prob of token {}", attrgetter("logprobs")),
    "critic": ("value of state {} of the critic", lambda output: output),
}


@dataclass
class Row:
    """One row of an optimizer step, replayed alone."""

    position: int  # position in the minibatch
    rank: int  # the rank that replayed it
    losses: dict[str, float] = field(default_factory=dict)  # by model: the row's part of the step's loss
    first: str | None = None  # the first of its tensors that was not finite


@dataclass(frozen=True)
class Origin:
    """The origin of the first non-finite number, as far as it could be found."""

    what: str
    rank: int | None  # the rank that computed it
    position: int | None  # position of its row in the minibatch


def locate_nonfinite(learner: Learner, minibatch: Experience, kl_coef: float, critic_only: bool) -> list[Row]:
    """Replays every row of ``minibatch`` and returns the rows in their order. A collective.

    Weights, optimizers and counters do not change.
    """
    world = learner.world
    plan = microbatch_rows(minibatch, 1, world)
    micros = [minibatch.select(part).trimmed() for part in plan]
    rows = [Row(int(part), world.rank) for part in plan]
    totals, value_totals = learner.totals(minibatch)
    if not critic_only:
        loss = partial(learner.policy_loss, totals=totals, value_totals=value_totals, kl_coef=kl_coef)
        _replay("actor", learner.actor, loss, micros, rows)
    if learner.critic is not None:
        _replay("critic", learner.critic, partial(learner.value_loss, totals=value_totals), micros, rows)
    return sorted((row for part in world.gather_objects(rows) for row in part), key=lambda row: row.position)


def find_origin(learner: Learner, skipped: NonFiniteStep) -> Origin:
    """Finds the tensor and the row that caused a non-finite step, if a replay reproduces it. A collective."""
    if skipped.row is not None:
        return Origin(skipped.what[0], skipped.rank, skipped.rows.tolist().index(skipped.row))
    for row in locate_nonfinite(learner, skipped.minibatch, skipped.kl_coef, skipped.critic_only):
        if row.first is not None:
            return Origin(row.first, row.rank, row.position)
    what = " and ".join(skipped.what)
    return Origin(
        f"{what} (finite when the step was replayed: a fault of the hardware or of a kernel?)", None, None
    )


def _replay(
    name: str,
    model: TrainedModel,
    compute_loss: Callable[[Experience], tuple[Any, ...]],
    micros: list[Experience],
    rows: list[Row],
) -> None:
    """Runs forward and backward of one model on each row alone, and drops the gradients."""
    with nonfinite_tensors(name, model) as found:
        for i, (micro, row) in enumerate(zip(micros, rows, strict=True), start=1):
            loss, *_ = compute_loss(micro)
            _note(found, f"loss of the {name}", loss.detach())
            model.backward(loss, last=i == len(rows))
            row.losses[name] = float(loss.detach()) / model.world.size
            row.first, found[:] = row.first or next(iter(found), None), []
    model.skip(overflow=False)


@contextmanager
def nonfinite_tensors(name: str, model: TrainedModel) -> Iterator[list[str]]:
    """Records the non-finite outputs and gradients of ``model`` inside the block.

    Yields the list of their names, in the order of computation.
    """
    found: list[str] = []

    def note_result(module: Any, inputs: Any, output: Any) -> None:
        """Checks the log-probs [1,R] or values [1,S] of a single row, in which every position is attended."""
        what, numbers = RESULTS[name]
        bad = (~numbers(output).detach().isfinite()).nonzero()
        if len(bad):
            found.append(what.format(int(bad[0, -1])))

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
