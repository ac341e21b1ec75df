"""Tests which trackers a config starts, one or several at once, and that they get the settings."""

import pytest

from launch.cli import load_config
from ppo_ds.assemble.dry_run import dry_run_config
from ppo_ds.assemble.run import dashboards
from ppo_ds.config.schema import Config

QUICKSTART = ("+experiment=quickstart", "run.dir=run", "run.name=mine")


def config_of(*arguments: str) -> Config:
    return load_config([*QUICKSTART, *arguments], world_size=1)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("tracker=local", []),
        ("tracker=wandb", ["WandbTracker"]),
        ("tracker.wandb.mode=online", ["WandbTracker"]),
        ("tracker=tensorboard", ["TensorBoardTracker"]),
        ("tracker=trackio", ["TrackioTracker"]),
        ("tracker=[wandb,tensorboard]", ["WandbTracker", "TensorBoardTracker"]),
        (
            "tracker=[wandb_offline,tensorboard,trackio]",
            ["WandbTracker", "TensorBoardTracker", "TrackioTracker"],
        ),
    ],
)
def test_one_or_several_trackers(choice: str, expected: list[str]) -> None:
    config = config_of(choice)
    found = list(dashboards(config, 0))
    assert [type(tracker).__name__ for tracker in found] == expected
    assert config.tracker.logs_histograms == bool(expected)


def test_a_list_replaces_the_choice_of_an_experiment() -> None:
    arguments = ["+experiment=rlhf", "actor.model.path=models/actor"]
    chosen = [load_config([*arguments, *more], world_size=1) for more in ([], ["tracker=[tensorboard]"])]
    found = [[type(tracker).__name__ for tracker in dashboards(config, 0)] for config in chosen]
    assert found == [["WandbTracker"], ["TensorBoardTracker"]]


def test_a_dry_run_starts_none() -> None:
    config = dry_run_config(config_of("tracker=[wandb,tensorboard,trackio]"), 1)
    assert list(dashboards(config, 0)) == []


def test_settings_reach_the_trackers() -> None:
    config = config_of("tracker=[wandb,tensorboard,trackio]", "tracker.wandb.log_model=end")
    wandb, tensorboard, trackio = dashboards(config, 7)
    assert (wandb._run_name, wandb._config.mode, wandb._config.log_model) == ("mine", "online", "end")
    assert tensorboard._folder == "run/tensorboard" and tensorboard._resumed_at == 7
    assert (trackio._run_name, trackio._config.project, trackio._config.space) == ("mine", "ppo_ds", None)
