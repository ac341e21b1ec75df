"""Plain values to typed ones, with every mistake found at once and named by its full dotted key.

The closed config tree (`config.py`) and the keyword arguments of the open parts (`build.py`) go through the same conversion.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ppo_ds.config.renamed import RENAMED, current_name
from ppo_ds.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """The range of a number, used as ``Annotated[float, Bound(0, 1)]``."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # True: ``low`` itself is out

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


Count = Annotated[int, Bound(1)]  # 1, 2, ...
Natural = Annotated[int, Bound(0)]  # 0, 1, ...
Positive = Annotated[float, Bound(0, above=True)]
NonNegative = Annotated[float, Bound(0)]
Fraction = Annotated[float, Bound(0, 1)]


def show(value: Any) -> str:
    """A value as it would be typed on the command line, on one line."""
    text = (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else " ".join(str(value).split())
    )
    return text if len(text) <= 200 else text[:197] + "..."


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """``; did you mean x?`` or nothing."""
    close = get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def convert(value: Any, annotation: Any, key: str) -> Any:
    """``value`` as ``annotation`` wants it. Raises UserError with one line for each thing that is wrong in it.

    Understands int, float, bool, str, None, Literal, unions, list, tuple, dict, dataclasses and Annotated: with a Bound, or anything else that
    says `in` and what it wants as text, or with an object that has ``read(value, key)``. Other annotations are not checked.
    An int is a float but a bool is no number; "1e-6" is a float, since YAML 1.1 reads it as text.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if is_dataclass(annotation):
        problems: dict[str, str] = {}
        made = read(annotation, value, key, problems)
        if problems:
            raise UserError(*problems.values())
        return made
    if origin is Annotated:
        if hasattr(args[1], "read"):
            return args[1].read(value, key)
        made = convert(value, args[0], key)
        if made not in args[1]:
            raise UserError(f"{key}={show(value)}: must be {args[1]}")
        return made
    if origin in (Union, types.UnionType):
        return _convert_union(value, args, key)
    if annotation in (list, dict) or origin in (list, tuple, dict):
        return _convert_container(value, origin or annotation, args, key)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise UserError(f"{key}={show(value)}: must be one of {', '.join(map(show, args))}")
        return value
    return _convert_scalar(value, annotation, key)


def _convert_scalar(value: Any, annotation: Any, key: str) -> Any:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if annotation not in names:
        return value
    if annotation is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            pass
    if annotation is str and type(value) is int:  # run.name=2024
        value = str(value)
    if type(value) is not annotation or (annotation is float and not math.isfinite(value)):
        raise UserError(f"{key}={show(value)}: must be {names[annotation]}")
    return value


def _convert_union(value: Any, args: tuple[Any, ...], key: str) -> Any:
    if value is None and type(None) in args:
        return None
    lines: list[str] = []
    for arg in args:
        if arg is not type(None):
            try:
                return convert(value, arg, key)
            except UserError as error:
                lines = error.problems
    raise UserError(
        *[
            f"{line} or null"
            if type(None) in args and line.startswith(f"{key}=") and ": must be " in line
            else line
            for line in lines
        ]
    )


def _convert_container(value: Any, kind: type, args: tuple[Any, ...], key: str) -> Any:
    if kind is dict:
        if not isinstance(value, dict):
            raise UserError(f"{key}={show(value)}: must be a mapping ({key}.<name>=<value>)")
        each_value = args[1] if args else Any
        return dict(
            zip(
                value,
                _convert_all((item, each_value, f"{key}.{name}") for name, item in value.items()),
                strict=True,
            )
        )
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{key}={show(value)}: must be a list, as in {key}=[{show(value).strip('[]')}]")
    fixed = kind is tuple and (not args or args[-1] is not ...)
    if fixed and args and len(value) != len(args):
        raise UserError(f"{key}={show(list(value))}: must be a list of {len(args)}")
    each = args if fixed and args else [args[0] if args else Any] * len(value)
    return kind(
        _convert_all(
            (item, one, f"{key}[{i}]") for i, (item, one) in enumerate(zip(value, each, strict=True))
        )
    )


def _convert_all(items: Iterable[tuple[Any, Any, str]]) -> list[Any]:
    """(value, annotation, key) of each -> values; what is wrong with any of them is raised together."""
    made, problems = [], []
    for item in items:
        try:
            made.append(convert(*item))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return made


def read(cls: type[T], tree: Any, key: str, problems: dict[str, str], known: list[str] | None = None) -> T:
    """An instance of the dataclass ``cls`` from a nested dict; what is wrong goes to ``problems`` (full key -> line).

    A bad or missing value is replaced by its default or an empty one, so that the caller can go on and look for more mistakes.
    """
    known = dotted_keys(cls, key) if known is None else known
    hints = get_type_hints(cls, include_extras=True)
    if not isinstance(tree, dict):
        hint = f"; did you mean {key}.path={show(tree)}?" if isinstance(tree, str) and "path" in hints else ""
        problems[key] = f"{key}={show(tree)}: must be a section with keys {', '.join(hints)}{hint}"
        return cls(**{f.name: _stand_in(f, hints[f.name]) for f in fields(cls)})
    dot = f"{key}." if key else ""
    for name in tree:
        if name in hints:
            continue
        if renamed := old_spellings(f"{dot}{name}", tree[name]):
            problems |= renamed
        else:
            problems[f"{dot}{name}"] = (
                f"{dot}{name}={show(tree[name])}: no such key{_suggest(str(name), hints, dot, known)}"
            )
    values = {}
    for f in fields(cls):
        full, hint, given = f"{dot}{f.name}", hints[f.name], tree.get(f.name)
        values[f.name] = _stand_in(f, hint)
        if is_dataclass(hint):
            values[f.name] = read(hint, tree.get(f.name, {}), full, problems, known)
        elif _has_no_default(f) and given in (None, "", "???"):
            problems[full] = f"{full} is missing{': ' + f.metadata['how'] if 'how' in f.metadata else ''}"
        elif f.name in tree:
            try:
                values[f.name] = convert(given, hint, full)
            except UserError as error:
                problems.update({f"{full}#{i}" if i else full: line for i, line in enumerate(error.problems)})
    return cls(**values)


def _has_no_default(f: Field) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _stand_in(f: Field, hint: Any) -> Any:
    """The default of a field, or something of its type."""
    if is_dataclass(hint):
        section = get_type_hints(hint, include_extras=True)
        return hint(**{inner.name: _stand_in(inner, section[inner.name]) for inner in fields(hint)})
    if not _has_no_default(f):
        return f.default if f.default is not MISSING else f.default_factory()
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return {int: 1, float: 1.0, str: "", dict: {}}.get(get_origin(hint) or hint)


def _suggest(name: str, siblings: Iterable[str], dot: str, known: list[str]) -> str:
    """What may have been meant: the same name deeper down, a name like it beside it, the same name elsewhere; else what there is."""
    elsewhere = [k for k in known if k.rsplit(".", 1)[-1] == name] or [
        k for k in known if k.replace(".", "_").endswith(f"_{name}")
    ]
    inside = [k for k in elsewhere if dot and k.startswith(dot)]
    near = [dot + sibling for sibling in get_close_matches(name, list(siblings), n=1, cutoff=0.6)]
    exact = [k for k in known if k.startswith(dot) and k[len(dot) :].replace(".", "_") == name]
    if best := exact or inside or (not dot and elsewhere) or near or elsewhere:
        return f"; did you mean {' or '.join(best[:3])}?"
    return f"; the keys of {dot.rstrip('.') or 'the config'} are {', '.join(siblings)}"


def old_spellings(key: str, value: Any) -> dict[str, str]:
    """Old key -> line that names the new one, for ``key`` and what stands below it; empty if nothing there was renamed."""
    if new := current_name(key):
        if not isinstance(value, dict) or not value:
            return {key: f"{key}={show(value)}: is called {new} now"}
    elif not isinstance(value, dict) or not any(old.startswith(f"{key}.") for old in RENAMED):
        return {}
    return {
        old: line
        for name, item in value.items()
        for old, line in old_spellings(f"{key}.{name}", item).items()
    }


def dotted_keys(cls: type, prefix: str = "") -> list[str]:
    """Every key below a dataclass, leaves and sections."""
    keys = []
    for name, hint in get_type_hints(cls).items():
        full = f"{prefix}.{name}" if prefix else name
        keys += [full, *(dotted_keys(hint, full) if is_dataclass(hint) else [])]
    return keys


def defaults(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass tree as a nested dict, without the keys that have none."""
    tree: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for f in fields(cls):
        if is_dataclass(hints[f.name]):
            tree[f.name] = defaults(hints[f.name])
        elif not _has_no_default(f):
            tree[f.name] = _stand_in(f, hints[f.name])
    return tree
