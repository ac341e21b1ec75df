"""Makes numbers of this process NaN, without support for it in ppo_ds.

    setattr(*injected("loss.actor:rank=1:at=3"))

The argument is a place in the code, then options: ``rank`` (default: all ranks), ``at`` (number of
the visit to the place at which the injection begins; default 1), ``times`` (number of consecutive visits with
an injection; default 1, 0 means unlimited). Places:

    loss.actor  loss.critic    the loss of a micro-batch
    loss.scorer                the loss of a micro-batch of stage=reward_model
    loss.sft                   the loss of a micro-batch of the stage sft
    grad.actor  grad.critic    the gradients of a micro-batch, not its loss
    score                      the first score of a rollout
    logprob                    the first log-prob that the training engine computes for a rollout
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ppo_ds.engine.lockstep import LockstepResult
from ppo_ds.finetune.reward_model import RewardModelTrainer
from ppo_ds.finetune.sft import SFTTrainer
from ppo_ds.ppo import experience
from ppo_ds.ppo.learner import Learner
from ppo_ds.ppo.model_outputs import ModelForwards


def nan_loss(result: tuple[Any, ...]) -> tuple[Any, ...]:
    loss, *rest = result
    return loss * math.nan, *rest


def nan_gradient(result: tuple[Any, ...]) -> tuple[Any, ...]:
    result[0].register_hook(lambda gradient: gradient * math.nan)
    return result


def nan_score(result: Any) -> Any:
    result.scores[0] = math.nan
    return result


def nan_logprob(result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result[0][0, 0] = math.nan
    return result


PLACES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "loss.actor": (Learner, "policy_loss", nan_loss),
    "loss.critic": (Learner, "value_loss", nan_loss),
    "loss.sft": (SFTTrainer, "loss", nan_loss),
    "grad.actor": (Learner, "policy_loss", nan_gradient),
    "grad.critic": (Learner, "value_loss", nan_gradient),
    "loss.scorer": (RewardModelTrainer, "loss", nan_loss),
    "score": (experience, "scored", nan_score),
    "logprob": (ModelForwards, "forward_actor", nan_logprob),
}


def injected(spec: str) -> tuple[Any, str, Callable[..., Any]]:
    """Returns the owner and name of the function at the place, and its replacement."""
    place, *options = spec.split(":")
    owner, name, make_nan = PLACES[place]
    given = dict(option.split("=") for option in options)
    rank, at, times = given.get("rank"), int(given.get("at", 1)), int(given.get("times", 1))
    compute, visits = getattr(owner, name), 0

    def replacement(*args: Any, **kwargs: Any) -> Any:
        nonlocal visits
        visits += 1
        result = compute(*args, **kwargs)
        mine = rank is None or rank == os.environ.get("RANK", "0")
        return make_nan(result) if mine and at <= visits < (at + times if times else math.inf) else result

    return owner, name, replacement


def step_unguarded(models: Any, losses: Any, extra: Any, **_: Any) -> LockstepResult:
    """Stands in for step_or_skip: takes the step even if losses or gradients are not finite."""
    assert extra is None
    return LockstepResult({name: model.step() for name, model in models.items()}, (), False, [])
