"""Finds a model of the command line: a run directory, a model folder, an adapter or a Hub name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppo_ds.commands.entry_points import command
from ppo_ds.config.checks.data import looks_local
from ppo_ds.config.hub_cache import in_hub_cache
from ppo_ds.config.similar_paths import did_you_mean_path, model_sibling, similar_path
from ppo_ds.errors import UserError
from ppo_ds.storage.reading import is_below, read_json

KINDS = "give a run directory, a model folder, an adapter folder or a Hub name"


@dataclass(frozen=True)
class NamedModel:
    """A policy that a tool loads."""

    name: str  # names the model in results
    path: str  # model folder or Hub name; of the base model if there is an adapter
    key: str  # names the path in error messages
    tokenizer_path: str  # model folder or Hub name
    adapter: Path | None = None  # folder of a LoRA adapter of the model at ``path``


def find_models(arguments: Sequence[str], base: str | None = None) -> list[NamedModel]:
    """Finds the models of several arguments and gives them different names.

    ``base`` is the base model of all adapters, instead of the base models in their adapter_config.json files.
    """
    models = [find_model(argument, base) for argument in arguments]
    names = [model.name for model in models]
    models = [
        model if names.count(model.name) == 1 else replace(model, name=argument)
        for model, argument in zip(models, arguments, strict=True)
    ]
    repeated = [model.name for i, model in enumerate(models) if model in models[:i]]
    if repeated:
        raise UserError(f"{repeated[0]}: is given twice; each model can be compared once")
    return models


def find_model(argument: str, base: str | None = None) -> NamedModel:
    """Finds the model of one argument; raises UserError if a local folder contains no model."""
    key, folder = "MODEL", Path(argument).expanduser()
    if not 0 < max(map(len, argument.strip().encode(errors="replace").split(b"/"))) < 256:
        raise UserError(f"MODEL={argument!r}: is empty or has a name of more than 255 bytes; {KINDS}")
    if not folder.exists():
        if looks_local(argument):
            raise UserError(f"{argument}: no such folder; {KINDS}{did_you_mean_path(argument)}")
        if (sibling := similar_model(argument)) and not in_hub_cache(argument):
            raise UserError(
                f"{argument}: no such folder; did you mean {sibling}? (a Hub model whose name is similar to "
                f"a local folder must be in the cache first: hf download {argument})"
            )
        return NamedModel(argument, argument, key, argument)
    if not folder.is_dir():
        raise UserError(f"{argument}: is a file; {KINDS}")
    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        if not is_below(folder / "model", folder):
            raise UserError(f"{folder / 'model'}: is a link to a folder elsewhere; give that folder")
        return NamedModel(short_name(folder), str(folder / "model"), key, str(folder / "model"))
    if (folder / "config.json").is_file():
        return NamedModel(short_name(folder), str(folder), key, str(folder))
    if (folder / "adapter_config.json").is_file():
        path = base or base_of_adapter(folder)
        own = folder if (folder / "tokenizer_config.json").is_file() else path
        return NamedModel(short_name(folder), path, "actor.model.path", str(own), folder)
    if any((folder / name).exists() for name in ("checkpoints", "config.yaml", "state.json")):
        raise UserError(
            f"{argument}: contains no finished model; export a checkpoint with {command('export')} "
            f"{argument}, and give the folder that it prints"
        )
    raise UserError(
        f"{argument}: contains no model (no config.json, adapter_config.json or model/config.json); {KINDS}"
    )


def similar_model(argument: str) -> Path | None:
    """Returns a model folder or run directory with a path similar to ``argument``, or None."""
    if sibling := model_sibling(argument):
        return sibling
    similar = similar_path(Path(argument))
    return similar if similar and (similar / "model" / "config.json").is_file() else None


def base_of_adapter(folder: Path) -> str:
    file = folder / "adapter_config.json"
    remedy = "give the base model as actor.model.path=MODEL"
    try:
        base = read_json(file)["base_model_name_or_path"]
    except (OSError, LookupError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise UserError(f"{file}: names no base model; {remedy}")
    if looks_local(base) and not Path(base).expanduser().is_dir():
        raise UserError(f"{file}: base_model_name_or_path={base}: no such folder; {remedy}")
    return base


def short_name(folder: Path) -> str:
    """Returns the last distinctive part of a path: "sums" for outputs/sums/model."""
    parts = [part for part in folder.resolve().parts if part not in ("model", "adapter", "exports")]
    return parts[-1]
