"""What went wrong first: an optimizer step once more, a row at a time, with an eye on every module and every gradient. Nothing is learned from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ppo_ds.ppo.batching import microbatch_rows
from ppo_ds.ppo.learner import Learner, Update
from ppo_ds.training.health import NonFiniteStep
from ppo_ds.types import Experience


@dataclass
class Row:
    """One row of an optimizer step, on the rank that had it."""

    place: int  # in the minibatch
    rank: int
    losses: dict[str, float] = field(
        default_factory=dict
    )  # by model: the row's part of the loss of the optimizer step
    first: str | None = None  # of all its tensors, the first that was not finite


@dataclass(frozen=True)
class Blame:
    """What is known of the first number that was not finite."""

    what: str
    rank: int | None  # the one that computed it
    place: int | None  # of its row in the minibatch


def locate_nonfinite(learner: Learner, minibatch: Experience, kl_coef: float, critic_only: bool) -> list[Row]:
    """Every row of ``minibatch``, in its order. Weights, optimizers and counters stay as they are. A collective."""
    world = learner.world
    plan = microbatch_rows(minibatch, 1, world)
    micros = [minibatch.select(part).trimmed() for part in plan]
    rows = [Row(int(part), world.rank) for part in plan]
    update = Update(minibatch, torch.arange(len(minibatch)), micros, kl_coef, critic_only)
    for name, (model, losses) in learner.losses(update).items():
        with _watching(model.module, name) as seen:
            for i, (row, make) in enumerate(zip(rows, losses, strict=True), start=1):
                loss, _ = make()
                _look(seen, f"loss of the {name}", loss.detach())
                model.backward(loss, last=i == len(rows))
                row.losses[name] = float(loss.detach()) / world.size
                row.first, seen[:] = row.first or next(iter(seen), None), []
        model.skip(overflow=False)
    return sorted((row for mine in world.gather_objects(rows) for row in mine), key=lambda row: row.place)


def blame(learner: Learner, trouble: NonFiniteStep) -> Blame:
    """As much as can be found out. A collective."""
    if trouble.row is not None:
        return Blame(trouble.what[0], trouble.rank, trouble.places.tolist().index(trouble.row))
    for row in locate_nonfinite(learner, trouble.minibatch, trouble.kl_coef, trouble.critic_only):
        if row.first is not None:
            return Blame(row.first, row.rank, row.place)
    return Blame(
        f"{' and '.join(trouble.what)} (not again when the step was repeated: the hardware's fault, or a kernel's?)",
        None,
        None,
    )


@contextmanager
def _watching(module: nn.Module, name: str) -> Iterator[list[str]]:
    """Inside, the list is told what is not finite, in the order in which it comes about."""
    seen: list[str] = []
    with ExitStack() as hooks:
        for path, part in module.named_modules():
            if not path:
                hooks.callback(part.register_forward_hook(partial(_look_at_answer, seen, name)).remove)
            elif not any(part.children()):
                hooks.callback(
                    part.register_forward_hook(
                        partial(_look_at_output, seen, f"output of {name}.{path}")
                    ).remove
                )
        for path, parameter in module.named_parameters():
            if parameter.requires_grad:
                hooks.callback(
                    parameter.register_hook(partial(_look, seen, f"gradient of {name}.{path}")).remove
                )
        yield seen


def _look(seen: list[str], what: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        seen.append(what)


def _look_at_output(seen: list[str], what: str, module: nn.Module, given: Any, output: Any) -> None:
    for tensor in output if isinstance(output, tuple | list) else [output]:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            _look(seen, what, tensor.detach())


def _look_at_answer(seen: list[str], name: str, module: nn.Module, given: Any, output: Any) -> None:
    """Log-probs or values of the one row, all of them attended."""
    what, numbers = (
        (f"value of state {{}} of the {name}", output)
        if isinstance(output, Tensor)
        else ("log-prob of token {}", output.logprobs)
    )
    broken = (~numbers.detach().isfinite()).nonzero()
    if len(broken):
        seen.append(what.format(int(broken[0, -1])))
