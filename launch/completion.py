"""Completes arguments of the command line in a shell: names of groups, options, keys and their values.

The shell runs the command itself with the variable _ARGCOMPLETE, as argcomplete's page describes:

    eval "$(register-python-argcomplete ppo-ds-train)"
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import argcomplete

from launch.composing import Folders
from ppo_ds.config.reading import section_of
from ppo_ds.config.reference import choices_of, sections_of
from ppo_ds.config.schema import Config

PLUS = ("experiment", "pipeline")  # groups without a default, which are chosen with +GROUP=OPTION


def complete(parser: argparse.ArgumentParser, conf: Path) -> None:
    """Prints the completions of the command line and exits. Arguments named ``overrides`` are Hydra's."""
    folders = Folders((conf,))
    for action in parser._actions:
        if action.dest == "overrides":
            setattr(action, "completer", lambda prefix, **_: list(overrides(prefix, folders)))  # noqa: B010
    argcomplete.autocomplete(parser)


def overrides(prefix: str, folders: Folders) -> Iterator[str]:
    """Yields the overrides that begin with ``prefix``; for a key, only up to the next dot."""
    name, equals, _ = prefix.partition("=")
    groups = {f"+{group}" if group in PLUS else group: group for group in [*folders.groups(), "pipeline"]}
    sign = "+" if prefix.startswith("+") else ""
    fields = {
        f"{section}.{key}": field
        for section, model in sections_of(Config)
        for key, field in model.all_fields().items()
        if section_of(field) is None
    }
    if equals:
        options = folders.options(groups[name]) if name in groups else []
        values = choices_of(fields[name]) if name in fields else []
        yield from (
            f"{name}={value}" for value in [*options, *values] if f"{name}={value}".startswith(prefix)
        )
        return
    names = [f"{group}=" for group in groups] + [f"{sign}{key}=" for key in fields]
    parts = {f"{name[: len(prefix)]}{head(name[len(prefix) :])}" for name in names if name.startswith(prefix)}
    yield from sorted(parts)


def head(rest: str) -> str:
    """Returns ``rest`` up to and including its first dot."""
    before, dot, _ = rest.partition(".")
    return before + dot
