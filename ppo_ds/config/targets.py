"""Open parts of the config: a `_target_` and its keyword arguments, checked against the callable's own signature.

An argument may be such a part itself, at any depth of lists, mappings and dataclasses: annotated ``Annotated[Reward, NESTED]``, it is checked
with the whole and made with the same services, before what it belongs to.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, get_type_hints

from ppo_ds.config.typed import convert, show
from ppo_ds.errors import UserError

_SERVICE = inspect.Parameter.KEYWORD_ONLY
_KEY = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True)
class _Unmade:
    """Stands for an object until the services are there."""

    make: Callable[..., Any]


class _Nested:
    def read(self, value: Any, key: str) -> _Unmade:
        if not isinstance(value, dict):
            raise UserError(f"{key}={show(value)}: must be a section with a _target_")
        return _Unmade(bind(value, key))


NESTED = _Nested()


def bind(spec: dict[str, Any], key: str) -> Callable[..., Any]:
    """The callable of ``spec`` with its config arguments typed and bound; what is still open are its keyword-only services.

    ``key`` is the section's name in the config, and a service too: objects name their keys in messages. Raises UserError with every unknown,
    missing or mistyped key, before anything is loaded.
    """
    target = _imported(spec.get("_target_"), key)
    parameters = inspect.signature(target).parameters
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    open_keys = {name: p for name, p in parameters.items() if p.kind is _KEY}
    given = {name: value for name, value in spec.items() if name != "_target_"}
    problems = [
        f"{key}.{name}={_shown(name, given[name])}: no such key{_known(name, open_keys, key)}"
        for name in given
        if name not in open_keys
    ]
    arguments = {}
    for name, parameter in open_keys.items():
        hint, required = hints.get(name, Any), parameter.default is inspect.Parameter.empty
        if name in given or (
            required and is_dataclass(hint)
        ):  # a section that is not there at all lacks its own required keys
            try:
                arguments[name] = convert(given.get(name, {}), hint, f"{key}.{name}")
            except UserError as error:
                problems += error.problems
        elif required:
            problems.append(f"{key}.{name} is missing")
    if problems:
        raise UserError(*problems)

    def call(**services: Any) -> Any:
        services = services | {"key": key}
        wanted = [
            name
            for name, p in parameters.items()
            if p.kind is _SERVICE and (name in services or p.default is inspect.Parameter.empty)
        ]
        return target(**_made(arguments, services), **{name: services[name] for name in wanted})

    return call


def _made(value: Any, services: dict[str, Any]) -> Any:
    """``value`` with every nested part in it made."""
    if isinstance(value, _Unmade):
        return value.make(**services)
    if isinstance(value, dict):
        return {name: _made(item, services) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_made(item, services) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _made(getattr(value, f.name), services) for f in fields(value)})
    return value


def _imported(path: Any, key: str) -> Callable[..., Any]:
    if path in (None, "", "???"):
        raise UserError(f"{key}._target_ is missing: give package.module.name")
    module, _, name = str(path).rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{key}._target_={path}: cannot be imported ({error}); give package.module.name"
        ) from error
    if not callable(target):
        raise UserError(f"{key}._target_={path}: is not callable")
    return target


def _shown(name: str, value: Any) -> str:
    """Of a key that is none; what may be a secret that somebody wrote into the config is not repeated."""
    return "..." if re.search(r"(^|_)(key|token|secret|password)$", name, re.IGNORECASE) else show(value)


def _known(name: str, keys: dict[str, Any], section: str) -> str:
    close = get_close_matches(
        name, list(keys), n=1, cutoff=0.6
    )  # of the bare names: the section that all share would make any two alike
    if close:
        return f"; did you mean {section}.{close[0]}?"
    return f"; its keys are {', '.join(f'{section}.{known}' for known in keys) or 'none'}"
