"""Checks sampling and data, and the model folders and data files on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ppo_ds.config.hub_cache import in_hub_cache
from ppo_ds.config.schema import (
    Config,
    PPOConfig,
    TextConfig,
    all_rewards,
    reward_models,
    trained_models,
    uses_reference,
)
from ppo_ds.config.sections.data import TASK, PPODataConfig, is_task
from ppo_ds.config.similar_paths import (
    did_you_mean_model,
    did_you_mean_path,
    is_model_folder,
    model_inside,
    model_sibling,
)
from ppo_ds.config.text import show
from ppo_ds.errors import not_installed

FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow")
# stage -> word for its rows in error messages
ROWS = {"ppo": "prompts", "sft": "demonstrations", "reward_model": "pairs of answers"}


def check_sampling(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if min_new_tokens is above max_new_tokens, and if a stop string is empty."""
    sampling = config.sampling
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"sampling.min_new_tokens={sampling.min_new_tokens}: must be at most "
            f"sampling.max_new_tokens={sampling.max_new_tokens}"
        )
    if "" in sampling.stop:
        yield f"sampling.stop={show(sampling.stop)}: must not contain an empty string"


def check_paths(config: TextConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each local model folder or data file that is missing or unusable.

    Also yields one if data.path is not set and there is no mixture.
    """
    data = config.data
    if data.path is None and not (isinstance(data, PPODataConfig) and data.mix):
        several = " (or data.mix: several of them)" if isinstance(data, PPODataConfig) else ""
        yield (
            "data.path is missing: a Hub data set or a JSONL, JSON, Parquet or CSV file of "
            f"{ROWS.get(config.stage, 'rows')}{several}"
        )
    for key, path in _data_paths(config).items():
        if path and looks_local(path) and not is_prepared(path, config) and not Path(path).exists():
            yield f"{key}={path}: no such file{did_you_mean_path(path)}"
    paths = _model_paths(config)
    if isinstance(config, PPOConfig):
        path = config.reference.model.path
        if not uses_reference(config) or path == config.actor.model.path:
            del paths["reference.model.path"]
    for key, path in paths.items():
        yield from _missing_model(key, path, config)


def check_tasks(config: TextConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each mistake in task settings that is found without reasoning-gym.

    Also yields one if a task is used and reasoning-gym is not installed.
    """
    data, paths = config.data, _data_paths(config)
    made = [key for key, path in paths.items() if is_task(path)]
    for key in made:
        if not isinstance(data, PPODataConfig) or key == "data.ptx_path":
            yield f"{key}={paths[key]}: makes prompts, which only stage=ppo uses, in data.path or data.mix"
    if made and find_spec("reasoning_gym") is None:
        yield f"{made[0]}={paths[made[0]]}: {not_installed('reasoning-gym', 'reasoning-gym')}"
    if not isinstance(data, PPODataConfig):
        return
    settings = {"data.task": data.task, "data.eval_task": data.eval_task}
    settings |= {f"data.mix[{i}].task": part.task for i, part in enumerate(data.mix)}
    for key, task in settings.items():
        path = key.replace("task", "path")
        if task and path not in made:
            yield f"{key}={show(task)}: needs {path}={TASK}TASK (it is {show(paths[path])}); remove it"
        elif type(task.get("seed", 0)) is not int:
            yield f"{key}.seed={show(task['seed'])}: must be a whole number, so that rows can be made again"


def _model_paths(config: Config) -> dict[str, str | None]:
    paths = {f"{name}.model.path": model.model.path for name, model in trained_models(config).items()}
    if isinstance(config, PPOConfig):
        paths["reference.model.path"] = config.reference.model.path
        for reward, section in all_rewards(config).items():
            paths |= {f"{key}.path": model["path"] for key, model in reward_models(section, reward)}
    return paths


def _missing_model(key: str, path: str | None, config: Config) -> Iterator[str]:
    if not path or is_prepared(path, config):
        return
    folder = Path(path).expanduser()
    if looks_local(path):
        if not folder.exists():
            yield f"{key}={path}: no such folder{did_you_mean_model(path)}"
        elif not is_model_folder(folder):
            inside = model_inside(folder)
            meant = f"; did you mean {inside}?" if inside else ""
            yield f"{key}={path}: not a model folder (no config.json in it){meant}"
    elif (sibling := model_sibling(path)) and not in_hub_cache(path):
        # makes no request to the Hub, since the name is far more likely a misspelled folder
        yield (
            f"{key}={path}: no such folder; did you mean {sibling}? (a Hub model whose name is similar to a "
            f"local folder must be in the cache first: hf download {path})"
        )


def _data_paths(config: TextConfig) -> dict[str, str | None]:
    data = config.data
    paths = {"data.path": data.path, "data.eval_path": data.eval_path}
    if not isinstance(data, PPODataConfig):
        return paths
    mixed = {f"data.mix[{i}].path": part.path for i, part in enumerate(data.mix)}
    return paths | {"data.ptx_path": data.ptx_path} | mixed


def hub_names(config: Config) -> list[str]:
    """Returns the names of models and data on the Hub, without those that `prepare` may create."""
    paths = [*_model_paths(config).values()]
    if isinstance(config, TextConfig):
        paths += _data_paths(config).values()
    named = (path for path in paths if path and not is_task(path) and not looks_local(path))
    return [path for path in named if not is_prepared(path, config)]


def looks_local(path: str) -> bool:
    """Returns whether a path is a local file or folder rather than a Hub id.

    A `name` or `org/name` that does not exist on this machine counts as a Hub id. `hf://...` is a file of a
    Hub data set.
    """
    return not path.startswith("hf://") and (
        path.startswith(("/", ".", "~"))
        or path.count("/") > 1
        or path.endswith(FILE_ENDINGS)
        or os.path.exists(path)
    )


def is_prepared(path: str, config: Config) -> bool:
    """Returns whether `prepare` may create ``path``: any path, or only those in its argument `dir` if set."""
    made = (config.prepare or {}).get("dir")
    return config.prepare is not None and (
        not made or Path(path).absolute().is_relative_to(Path(made).absolute())
    )
