"""Tests lines of the start-up banner."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ppo_ds.assemble.banner import checkpoint_times, resumed
from ppo_ds.assemble.shared import loading, short_count
from ppo_ds.config.sections.run import CheckpointConfig
from ppo_ds.tracking.banner import Banner


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


@pytest.mark.parametrize("main", [True, False])
def test_rank_0_says_which_model_is_loaded_and_its_size(tmp_path: Path, main: bool) -> None:
    said: list[str] = []
    context: Any = SimpleNamespace(world=SimpleNamespace(is_main=main), banner=Banner(said.append))
    for part, rows in enumerate((1000, 500), start=1):
        weights = {f"weight_{part}": torch.zeros(rows, 10), f"bias_{part}": torch.zeros(3)}
        save_file(weights, tmp_path / f"model-0000{part}-of-00002.safetensors")
    loading(context, "actor", str(tmp_path), None)
    loading(context, "critic", "org/not-downloaded", "main")
    loading(context, "reference", None, None)
    expected = [
        f"starting   loading the actor: {tmp_path}, 15k parameters",
        "starting   loading the critic: org/not-downloaded",
    ]
    assert said == (expected if main else [])


def test_counts_in_words() -> None:
    assert [short_count(n) for n in (7, 15_006, 494_032_768, 1_543_714_304, 72_700_000_000)] == (
        ["7", "15k", "494M", "1.54B", "72.7B"]
    )


def test_a_resumed_run_says_where_it_goes_on() -> None:
    checkpoint = Path("runs/a/checkpoints/step_000003")
    assert resumed("runs/a", None, 0, 5) == []
    (line,) = resumed("runs/a", checkpoint, 3, 5)
    expected = f"resumed    after step 3, from {checkpoint} (set run.name or run.dir to start another run)"
    assert line == expected
    for steps in (3, 2):  # also if run.steps was lowered
        assert resumed("runs/a", checkpoint, 3, steps) == [
            "resumed    runs/a holds all 3 steps: nothing is left to train; raise run.steps, or choose "
            "another run.name"
        ]
