"""Reads the settings of a checkpoint or a dump, which may be untrusted.

The settings cannot choose files of this machine, except models. A model's Python code runs only if the
user allows it again. Data and rewards are not loaded, and a chat template must be a text, not a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from ppo_ds.config.chat_template import is_template
from ppo_ds.config.reading import read
from ppo_ds.config.schema import Config, TextConfig, inherit, own_code, resolved
from ppo_ds.config.types import replace
from ppo_ds.errors import UserError
from ppo_ds.storage.reading import is_plain

ConfigT = TypeVar("ConfigT", bound=TextConfig)


def config_of_settings(
    settings: Any, file: Path, *, trust_remote_code: bool, with_template: bool = True, kind: type[ConfigT]
) -> ConfigT:
    """Builds and checks a Config from the settings of ``file``.

    Raises UserError for invalid settings, for stages other than those of ``kind``, for a chat template that
    is the path of a file, and, unless ``trust_remote_code``, for a model that runs its own Python code.
    Settings that name the user's own Python code are left out. Without ``with_template``, as for a replay,
    they raise UserError instead, and the chat template is left out.
    """
    if not isinstance(settings, dict) or not is_plain(settings):
        raise UserError(f"{file}: holds no settings, which are nested mappings with text as keys")
    for key, section, name in own_code(settings):  # code that was not given on this machine is not imported
        if not with_template:
            raise UserError(
                f"{file}: {key}={name}: is code of that run, which is not imported for a replay; "
                "update.json beside it names the first tensor that was not finite"
            )
        if key.startswith("algo."):  # not needed to load a model
            section.clear()
        else:
            section.pop(key.rpartition(".")[2])
    config, problems = read(Config, settings)
    if problems:
        raise UserError(*(f"{file}: {line}" for line in problems.values()))
    if not isinstance(config, kind):
        stages = [name for name, variant in Config.variants.items() if issubclass(variant, kind)]
        raise UserError(
            f"{file}: made with stage={config.stage}; this tool needs stage={' or '.join(stages)}"
        )
    config = inherit(config)
    if not trust_remote_code:
        for key in trusting_keys(resolved(config)):
            raise UserError(
                f"{file}: {key}=true runs Python code of {key.rpartition('.')[0]}.path; read that code, then "
                "repeat with --trust-remote-code"
            )
    if not with_template:
        return replace(config, data=replace(config.data, chat_template=None))
    if config.data.chat_template is not None and not is_template(config.data.chat_template):
        raise UserError(
            f"{file}: data.chat_template={config.data.chat_template}: names a file, but a checkpoint "
            "may not choose files of this machine; replace the path by the text of that file"
        )
    return config


def trusting_keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the keys, at any depth, that allow a model's own code to run."""
    for name, value in tree.items():
        if name == "trust_remote_code" and value:
            yield f"{prefix}{name}"
        for i, inner in enumerate(value) if isinstance(value, list | tuple) else ():
            if isinstance(inner, dict):
                yield from trusting_keys(inner, f"{prefix}{name}[{i}].")
        if isinstance(value, dict):
            yield from trusting_keys(value, f"{prefix}{name}.")
