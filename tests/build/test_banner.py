"""Tests lines of the start-up banner."""

import pytest

from ppo_ds.build.banner import checkpoint_times
from ppo_ds.config.sections.run import CheckpointConfig


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "checkpoint every 15 minutes, at the end and at a stop signal"),
        ({"every": 1, "minutes": None}, "checkpoint every step, at the end and at a stop signal"),
        (
            {"every": 20, "minutes": 0.5},
            "checkpoint every 20 steps, every 0.5 minutes, at the end and at a stop signal",
        ),
        ({"minutes": None}, "checkpoint at the end and at a stop signal"),
        ({"every": 0}, "checkpoint none; checkpoint.every=0, so an interrupted run starts again"),
        (
            {"every": 0, "keep_best": True},
            "checkpoint only the one with the best evaluation (checkpoint.keep_best); checkpoint.every=0, so "
            "an interrupted run starts again",
        ),
    ],
)
def test_the_banner_states_when_checkpoints_are_written(config, line):
    assert checkpoint_times(CheckpointConfig(**config)) == line
