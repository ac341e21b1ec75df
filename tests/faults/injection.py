"""Makes losses or gradients of learners in this process NaN, without any code for it in the learner.

    setattr(Learner, *injected("loss.actor:rank=1:at=3"))

WHAT.ROLE, then options: WHAT is ``loss`` or ``grad``, ROLE is ``actor`` or ``critic``. ``rank`` (default: all), ``at`` (the
first loss that is affected, counted from 1; default 1), ``times`` (how many losses from there on, default 1; 0: all).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ppo_ds.engine.lockstep import LockstepResult
from ppo_ds.ppo.learner import Learner

METHODS = {"actor": "policy_loss", "critic": "value_loss"}


def injected(spec: str) -> tuple[str, Callable[..., Any]]:
    """Returns the name of the learner's loss method and the method that replaces it."""
    place, *options = spec.split(":")
    what, role = place.split(".")
    given = dict(option.split("=") for option in options)
    rank, at, times = given.get("rank"), int(given.get("at", 1)), int(given.get("times", 1))
    compute, calls = getattr(Learner, METHODS[role]), 0

    def replacement(self: Learner, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        nonlocal calls
        calls += 1
        loss, *rest = compute(self, *args, **kwargs)
        mine = rank is None or rank == os.environ.get("RANK", "0")
        if mine and at <= calls < (at + times if times else math.inf):
            loss = {"loss": nan_loss, "grad": nan_gradient}[what](loss)
        return loss, *rest

    return METHODS[role], replacement


def step_unguarded(models: Any, losses: Any, extra: Any, **_: Any) -> LockstepResult:
    """Stands in for step_or_skip: steps whatever the losses and gradients are."""
    assert extra is None
    return LockstepResult({name: model.step() for name, model in models.items()}, (), False, [])


def nan_loss(loss: Tensor) -> Tensor:
    return loss * math.nan


def nan_gradient(loss: Tensor) -> Tensor:
    """The loss as it is, whose gradients are NaN."""
    loss.register_hook(lambda gradient: gradient * math.nan)
    return loss
