"""Choices that every stage makes when it is built."""

from __future__ import annotations

import math

from ppo_ds.config.sections.run import RunConfig


def training_steps(run: RunConfig, rows: int, rows_per_step: int) -> int:
    """Returns the number of training steps: run.steps, or as many as run.epochs passes over ``rows`` need."""
    return run.steps or math.ceil((run.epochs or 0) * rows / rows_per_step)
