"""Inputs of the diagnosis of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppo_ds.compute.sizes import Shape
from ppo_ds.planning.run_memory import Estimate
from ppo_ds.tools.doctor.rates import Machine
from ppo_ds.tools.doctor.step_time import StepTime

STATE_BYTES = 12  # bytes per trained parameter in a checkpoint: an fp32 weight and two moments


@dataclass(frozen=True)
class Plan:
    """Inputs of the diagnosis of a run whose models could be read."""

    estimate: Callable[[Any], Estimate]  # for this config, or for one with other memory settings
    step_time: Callable[[Any, Machine, Estimate], StepTime]
    main: Shape  # of the model whose sizes the rates of a CPU are measured with
    evaluated: int  # prompts, rows or pairs of one evaluation
    flops: int  # of one step over all ranks
    checkpoint: int  # bytes of one checkpoint
    export: int  # bytes of the models that the run exports
