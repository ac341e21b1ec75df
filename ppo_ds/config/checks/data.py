"""Checks sampling and data, and the model folders and data files on this machine."""

from __future__ import annotations

from collections.abc import Iterator
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
from ppo_ds.config.sections.data import PPODataConfig
from ppo_ds.config.similar_paths import (
    did_you_mean_model,
    did_you_mean_path,
    is_model_folder,
    model_inside,
    model_sibling,
)
from ppo_ds.config.text import show

FILE_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow")
# stage -> name of its rows in error messages
ROWS = {"ppo": "prompts", "sft": "demonstrations", "reward_model": "pairs of answers"}


def check_sampling(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict between the options that end responses."""
    sampling = config.sampling
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"sampling.min_new_tokens={sampling.min_new_tokens}: must be at most "
            f"sampling.max_new_tokens={sampling.max_new_tokens}"
        )
    if sampling.min_new_tokens and sampling.stop:
        yield (
            f"sampling.min_new_tokens={sampling.min_new_tokens}: delays end tokens, but not the strings of "
            "sampling.stop; set only one of the two"
        )
    if "" in sampling.stop:
        yield f"sampling.stop={show(sampling.stop)}: must not contain an empty string"


def check_prompts(config: TextConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if the rows of training or evaluation are missing or given twice."""
    data, rows = config.data, ROWS.get(config.stage, "rows")
    mix = config.data.mix if isinstance(config, PPOConfig) else []
    if data.path is None and not mix:
        several = " (or data.mix: several of them)" if isinstance(config, PPOConfig) else ""
        yield f"data.path is missing: a Hub data set or a JSONL, JSON, Parquet or CSV file of {rows}{several}"
    if data.path is not None and mix:
        yield (
            f"data.path={data.path}: data.mix is set too; add this data set to data.mix, or set data.path "
            "to null"
        )
    if config.eval.every and not data.eval_path:
        yield f"eval.every={config.eval.every}: needs held-out {rows} in data.eval_path"


def check_model_folders(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each local folder of a trained model that is missing or has no config."""
    for name, model in trained_models(config).items():
        yield from _missing_model(f"{name}.model.path", model.model.path, config)


def check_reference_folder(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if the run needs a local reference folder that is missing or has no config."""
    path = config.reference.model.path
    if uses_reference(config) and path != config.actor.model.path:
        yield from _missing_model("reference.model.path", path, config)


def check_reward_folders(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each local folder of a reward model that is missing or has no config."""
    for reward, section in all_rewards(config).items():
        for key, model in reward_models(section, reward):
            yield from _missing_model(f"{key}.path", model["path"], config)


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
        # the Hub is not asked, since the name is far more likely a misspelled folder
        yield (
            f"{key}={path}: no such folder; did you mean {sibling}? (a Hub model whose name is similar to a "
            f"local folder must be in the cache first: hf download {path})"
        )


def check_data_files(config: TextConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each data file that does not exist."""
    for key, path in _data_paths(config).items():
        if path and looks_local(path) and not is_prepared(path, config) and not Path(path).exists():
            yield f"{key}={path}: no such file{did_you_mean_path(path)}"


def _data_paths(config: TextConfig) -> dict[str, str | None]:
    """Returns the paths of all data sets by their keys."""
    data = config.data
    paths = {"data.path": data.path, "data.eval_path": data.eval_path}
    if not isinstance(data, PPODataConfig):
        return paths
    mixed = {f"data.mix[{i}].path": part.path for i, part in enumerate(data.mix)}
    return paths | {"data.ptx_path": data.ptx_path} | mixed


def hub_names(config: Config) -> list[str]:
    """Returns the paths of models and data that are neither on this machine nor made by `prepare`."""
    paths = [model.model.path for model in trained_models(config).values()]
    if isinstance(config, PPOConfig):
        paths.append(config.reference.model.path)
        rewards = all_rewards(config).values()
        paths += [str(model["path"]) for reward in rewards for _, model in reward_models(reward)]
    if isinstance(config, TextConfig):
        paths += _data_paths(config).values()
    return [path for path in paths if path and not looks_local(path) and not is_prepared(path, config)]


def looks_local(path: str) -> bool:
    """Returns whether a path means a local file or folder rather than a Hub id.

    A `name` or `org/name` that does not exist on this machine is taken for a Hub id. `hf://...` names a file
    of a Hub data set.
    """
    return not path.startswith("hf://") and (
        path.startswith(("/", ".", "~"))
        or path.count("/") > 1
        or path.endswith(FILE_ENDINGS)
        or Path(path).exists()
    )


def is_prepared(path: str, config: Config) -> bool:
    """Returns whether `prepare` may create a path. If `prepare` has a `dir`, it creates paths only there."""
    made = (config.prepare or {}).get("dir")
    return config.prepare is not None and (
        not made or Path(path).absolute().is_relative_to(Path(made).absolute())
    )
