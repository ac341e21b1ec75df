"""Checks the arguments of ppo_ds targets against the signatures in their source files.

Importing a reward imports torch, which takes seconds. Instead, its source is parsed, so that a mistake in the
arguments is reported with all others before anything is imported. Other targets, and values whose annotations
this module cannot evaluate, are checked when the target is imported (targets.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import create_model

from ppo_ds.config.registry import import_target
from ppo_ds.config.targets import checked_as, read_arguments
from ppo_ds.config.types import Arguments, Section, parts_of
from ppo_ds.errors import UserError

OWN = "ppo_ds."
TORCH_FREE = "ppo_ds.config."  # these modules do not import torch, so their annotations may be imported


def misused_targets(section: dict[str, Any], key: str) -> Iterator[str]:
    """Yields an error line for each unknown, missing or mistyped argument of ppo_ds targets, at any depth."""
    for at, part in parts_of(section, key):
        target = str(part.get("_target_"))
        if target.startswith(OWN):
            try:
                read_arguments(declared_arguments(target), part, at)
            except UserError as error:
                yield from error.problems
            except (ImportError, AttributeError, ValueError) as error:
                yield f"{at}._target_={target}: cannot be imported ({error}); must be package.module.name"


def declared_arguments(target: str) -> type[Section]:
    """Makes a section whose keys are the positional parameters of a function or class of ppo_ds.

    Raises ImportError if the module does not exist, and AttributeError if it does not define the name.
    """
    module, _, name = target.rpartition(".")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {module!r}")
    source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    definition = _named(source.body, name)
    if definition is None:
        raise AttributeError(f"module {module!r} has no function or class {name!r}")
    names: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
    for node in source.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(TORCH_FREE):
            names |= {one.name: import_target(f"{node.module}.{one.name}") for one in node.names}
    fields: dict[str, Any] = {
        parameter: (checked_as(_type(annotation, names)), ... if required else None)
        for parameter, annotation, required in _parameters(definition)
    }
    return create_model(name, __base__=Arguments, **fields)


def _parameters(definition: ast.FunctionDef | ast.ClassDef) -> list[tuple[str, ast.expr | None, bool]]:
    """Returns (name, annotation, required) for each parameter of a function, class or dataclass."""
    if isinstance(definition, ast.ClassDef):
        init = _named(definition.body, "__init__")
        if init is None:
            fields = [one for one in definition.body if isinstance(one, ast.AnnAssign)]
            found = [(ast.unparse(one.target), one.annotation, one.value is None) for one in fields]
            return list(takewhile(lambda field: field[0] != "_", found))  # `_: KW_ONLY` ends the keys
        return _parameters(init)[1:]
    arguments = definition.args
    required = len(arguments.args) - len(arguments.defaults)
    return [(one.arg, one.annotation, i < required) for i, one in enumerate(arguments.args)]


def _named(body: list[ast.stmt], name: str) -> ast.FunctionDef | ast.ClassDef | None:
    definitions = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    return next((one for one in definitions if one.name == name), None)


def _type(annotation: ast.expr | None, names: dict[str, Any]) -> Any:
    """Returns the type that an annotation denotes, or Any if unknown; ``names`` maps names to types."""
    match annotation:
        case ast.Name(id=name):
            return names.get(name, Any)
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left, names) | _type(right, names)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
        case _:
            return Any
