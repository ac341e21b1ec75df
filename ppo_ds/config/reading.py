"""Reads nested dicts into sections and reports all problems at once, one line per problem."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from os.path import commonprefix
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ppo_ds.config.text import show
from ppo_ds.config.types import RANGE, Section, Variants, leaves, meaning

T = TypeVar("T", bound=Section)
Problems = dict[str, str]  # full key, with #0, #1, ... if it has several lines -> line

_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")
_STAND_INS: dict[object, Any] = {int: 1, float: 1.0, str: "", dict: {}}
_SECRET = re.compile(r"(^|[_.])(key|token|secret|password)$", re.IGNORECASE)


def read(section: type[T], tree: Any, key: str = "") -> tuple[T, Problems]:
    """Reads a section from a nested dict and returns it with the problems found.

    A wrong value is replaced by the key's default, or if the key is required, by a value of its type, so that
    the caller can check the rest of the config. ``key`` is the full name of the section.
    """
    own, found = _own_keys(section, tree, key)
    order = {name: place for place, name in enumerate(dotted_keys(section, key))}
    found = dict(sorted(found.items(), key=lambda item: order.get(item[0].split("#")[0], -1)))
    section = section.variant_of(own)
    completed = complete(section, own)
    try:
        return section.model_validate(completed), found
    except ValidationError as error:
        for wrong in error.errors(include_url=False):
            completed = _without(section, completed, wrong["loc"])
        usable = section.model_validate(complete(section, completed, stand_ins=True))
        return usable, problems(error, section, key) | found


def _own_keys(
    section: type[Section],
    tree: Any,
    key: str,
    variant: type[Variants] | None = None,
    rivals: Sequence[type[Section]] = (),
) -> tuple[Any, Problems]:
    """Returns ``tree`` without the keys that only other variants use, at any depth, and the problems.

    Each removed key with a non-default value is a problem. If the name of a variant is unknown, its section
    is read as the default variant, and the name is the only problem returned. ``variant`` is the innermost
    chosen variant that contains ``section``; ``rivals`` are the sections with this key in other variants.
    """
    if not isinstance(tree, Mapping):
        return tree, {}
    kept: dict[str, Any] = dict(tree)
    found, lines = Problems(), Problems()
    if issubclass(section, Variants):
        rivals = list(section.variants.values())
        _, wrong = _checked(section.model_fields[section.tag], kept.get(section.tag))
        if section.tag in kept and wrong:
            tag = f"{key}.{section.tag}".lstrip(".")
            found[tag] = f"{tag}={show(kept.pop(section.tag))}: {wrong}"
        variant = section = section.variant_of(kept)
    for name in [*kept]:
        full = f"{key}.{name}" if key else str(name)
        own = section.model_fields.get(name)
        others = [rival.model_fields[name] for rival in rivals if name in rival.model_fields]
        if own is not None and (inner := section_of(own)):
            inside = [other for field in others if (other := section_of(field))]
            kept[name], below = _own_keys(inner, kept[name], full, variant, inside)
            lines |= below
        elif own is None and others and variant is not None:
            value, inner = kept.pop(name), section_of(others[0])
            if not inner:
                value = _checked(others[0], value)[0]
            default = with_defaults(inner, {}) if inner else others[0].get_default(call_default_factory=True)
            lines |= {f"{full}#{i}": line for i, line in enumerate(variant.foreign(full, value, default))}
    return kept, found or lines


def _checked(field: FieldInfo, value: Any) -> tuple[Any, str]:
    """Returns the validated value of a key, and "" or a description of what is wrong."""
    hint: Any = Annotated[field.annotation, None, *field.metadata]
    try:
        return TypeAdapter(hint).validate_python(value), ""
    except ValidationError as error:
        return value, error.errors(include_url=False)[0]["msg"]


def complete(section: type[Section], tree: Any, stand_ins: bool = False) -> Any:
    """Adds missing sections to ``tree`` and removes empty required keys, which pydantic then reports.

    With ``stand_ins``, empty or missing required keys get a value of their type instead.
    """
    if not isinstance(tree, dict):
        return tree
    made = dict(tree)
    for name, field in section.variant_of(tree).model_fields.items():
        if inner := section_of(field):
            if name in made or field.is_required():
                made[name] = complete(inner, made.get(name, {}), stand_ins)
        elif field.is_required():
            if made.get(name, 0) in (None, "", "???"):  # ???: OmegaConf's mark for a missing value
                del made[name]
            if stand_ins:
                made.setdefault(name, _STAND_INS.get(get_origin(field.annotation) or field.annotation))
    return made


def _without(section: type[Section], tree: Any, location: tuple[int | str, ...]) -> Any:
    """Returns ``tree`` without the key at ``location``; a list or dict field with the key is left out."""
    if not isinstance(tree, dict) or not location:
        return {}
    name, *rest = location
    field = section.all_fields().get(str(name))
    inner = section_of(field) if field else None
    if inner and rest and name in tree:
        return tree | {name: _without(inner, tree[name], tuple(rest))}
    return {other: value for other, value in tree.items() if other != name}


def section_of(field: FieldInfo) -> type[Section] | None:
    """Returns the class of a field that is a section; None for other fields."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def with_defaults(section: type[Section], tree: Any, like: Any = None) -> Any:
    """Merges a nested dict over the defaults of a section; required keys have no default.

    The names of variants are read from ``like``, or if it is None, from ``tree``.
    """
    if not isinstance(tree, Mapping):
        return tree
    choice = tree if like is None else like
    made: dict[str, Any] = {}
    for name, field in section.variant_of(choice).model_fields.items():
        if inner := section_of(field):
            chosen = like.get(name, {}) if isinstance(like, Mapping) else None
            made[name] = with_defaults(inner, tree.get(name, {}), chosen)
        elif name in tree or not field.is_required():
            made[name] = tree[name] if name in tree else field.get_default(call_default_factory=True)
    return made | {name: value for name, value in tree.items() if name not in made}


def dotted_keys(section: type[Section], prefix: str = "") -> list[str]:
    """Returns the full names of all keys below a section, including the names of inner sections."""
    keys = []
    for name, field in section.all_fields().items():
        full = f"{prefix}.{name}" if prefix else name
        inner = section_of(field)
        keys += [full, *(dotted_keys(inner, full) if inner else [])]
    return keys


# ---- messages


def problems(error: ValidationError, section: type[Section], key: str = "") -> Problems:
    """Converts pydantic's errors about a section to lines, in the order of its keys, unknown keys first."""
    known, found = dotted_keys(section, key), Problems()
    items: dict[str, int] = {}  # full name of a list or mapping item -> its position in the order of errors
    places = [(_place(section, key, wrong, items), wrong) for wrong in error.errors(include_url=False)]
    for place, wrong in sorted(places, key=lambda pair: pair[0].order):
        kind, value = wrong["type"], wrong["input"]
        if kind in _UNKNOWN_KEY:  # each key below an unknown section gets its own line
            below = {".".join((place.key, *map(str, path))): item for path, item in leaves(value)}
            lines = {leaf: _unknown_key(place, leaf, item, known) for leaf, item in below.items()}
        elif kind == "whole_line":
            text = wrong["msg"].replace("$KEY", place.key).replace("$SECTION", place.key.rpartition(".")[0])
            lines = {f"{place.key}#{i}": line for i, line in enumerate(text.split("\n"))}
        elif kind == "missing" and place.complete:
            text = meaning(place.holder.all_fields()[place.name])
            how = f": {text[0].lower()}{text[1:].rstrip('.')}" if text else ""
            lines = {place.key: f"{place.key} is missing{how}"}
        else:
            lines = {place.key: f"{place.key}={show(value)}: {_remedy(wrong, place)}"}
        found |= {name: line for name, line in lines.items() if name not in found}
    return found


@dataclass(frozen=True)
class _Place:
    """The location of an error in the config, and the type expected at this location."""

    key: str
    holder: type[Section]  # the innermost section that contains the key
    name: str  # name of the key in that section
    hint: Any  # type of the value, stripped of Annotated and of "| None"
    metadata: list[Any]
    nullable: bool
    order: list[int]  # sort key: the position of each part of the key in its section; -1: an unknown key
    complete: bool  # False if the error is below the key: in one branch of a union, or a missing item


def _place(section: type[Section], key: str, wrong: Mapping[str, Any], items: dict[str, int]) -> _Place:
    holder, name, whole, order = section, "", True, []
    hint, metadata, nullable = unwrapped(section)
    for part in wrong["loc"]:
        kind, args = get_origin(hint) or hint, get_args(hint)
        inner: Any = Any
        if isinstance(kind, type) and issubclass(kind, Section):
            holder, name = kind, str(part)
            key = f"{key}.{name}" if key else name
            fields = kind.all_fields()
            order.append(list(fields).index(name) if name in fields else -1)
            if field := fields.get(name):
                inner = Annotated[field.annotation, None, *field.metadata]
        elif (kind is dict and part != "[key]") or (kind in (list, tuple) and wrong["type"] != "missing"):
            key = f"{key}.{part}" if kind is dict else f"{key}[{part}]"
            order.append(items.setdefault(key, len(items)))
            inner = args[-1] if kind is dict else args[0] if kind is list or ... in args else args[int(part)]
        else:
            whole = False
            break
        hint, metadata, nullable = unwrapped(inner)
    return _Place(key, holder, name, hint, metadata, nullable, order, whole)


def unwrapped(hint: Any) -> tuple[Any, list[Any], bool]:
    """Returns a type without Annotated and None, the metadata of Annotated, and whether None is allowed."""
    metadata: list[Any] = []
    nullable = False
    while True:
        args = get_args(hint)
        if get_origin(hint) is Annotated:
            hint, metadata = args[0], [*metadata, *args[1:]]
        elif get_origin(hint) in (Union, types.UnionType) and type(None) in args:
            nullable = True
            hint = Union[tuple(one for one in args if one is not type(None))]  # noqa: UP007
        else:
            return hint, metadata, nullable


def _remedy(wrong: Mapping[str, Any], place: _Place) -> str:
    kind, value, args = wrong["type"], wrong["input"], get_args(place.hint)
    if kind == "model_type":
        names = place.hint.all_fields()
        is_path = isinstance(value, str) and "path" in names
        hint = f"; did you mean {place.key}.path={show(value)}?" if is_path else ""
        return f"must be a section with keys {', '.join(names)}{hint}"
    if kind == "refused":
        text = wrong["msg"]
    elif get_origin(place.hint) in (Union, types.UnionType):
        text = f"must be {' or '.join(_in_words(one) for one in args)}"
    elif kind in ("list_type", "tuple_type"):
        text = f"must be a list, as in {place.key}=[{show(value).strip('[]')}]"
    elif kind == "dict_type":
        text = f"must be a mapping ({place.key}.<name>=<value>)"
    elif kind in ("missing", "too_long"):
        text = f"must be a list of {len(args)}"
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        text = f"must be {bounds(place.metadata)}"
    else:
        text = f"must be {_in_words(place.hint)}"
    wanted, mark, hint = text.partition("; ")
    return f"{wanted} or null{mark}{hint}" if place.nullable and text.startswith("must be ") else text


def _in_words(hint: Any) -> str:
    hint, metadata, _ = unwrapped(hint)
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    choices = [show(choice) for choice in get_args(hint)]
    one_of = ("one of " if len(choices) > 1 else "") + ", ".join(choices)
    words = names.get(get_origin(hint) or hint) or one_of
    return f"{words} {bounds(metadata)}".rstrip()


def bounds(metadata: list[Any]) -> str:
    """Describes the range of a number, such as ``at least 0 and at most 1``; "" without bounds."""
    limits = [(name, getattr(one, name)) for one in metadata for name in RANGE if hasattr(one, name)]
    return " and ".join(f"{RANGE[name]} {limit:g}" for name, limit in limits)


def _unknown_key(place: _Place, leaf: str, value: Any, known: list[str]) -> str:
    """Returns the error line for ``leaf``, an unknown key or a key below an unknown key.

    The line suggests one of these, in this order: almost the same name in the section, the same name in an
    inner section, the key for a setting of another system, a similar name in the section, or the same name in
    other sections. At the top level, the last two change places.
    """
    shown = "..." if _SECRET.search(leaf) else show(value)
    name, siblings = place.name, place.holder.all_fields()
    section = place.key.removesuffix(name)  # ends in a dot, or is empty
    elsewhere = [k for k in known if k.rsplit(".", 1)[-1] == name] or [
        k for k in known if k.replace(".", "_").endswith(f"_{name}")
    ]
    inside = [k for k in elsewhere if section and k.startswith(section)]
    near = [section + sibling for sibling in get_close_matches(name, list(siblings), n=1, cutoff=0.6)]
    typo = [section + sibling for sibling in get_close_matches(name, list(siblings), n=1, cutoff=0.85)]
    exact = [k for k in known if k.startswith(section) and k[len(section) :].replace(".", "_") == name]
    best = exact or typo or inside
    if not best and (lines := other_systems(leaf, known)):
        return f"{leaf}={shown}: no such key; {'; '.join(lines)}"
    best = best or (not section and elsewhere) or near or elsewhere
    if below := leaf.removeprefix(place.key):
        best = [key for k in best for key in get_close_matches(k + below, known, n=1)] or best
    if best:
        return f"{leaf}={shown}: no such key; did you mean {' or '.join(best[:3])}?"
    holder = section.rstrip(".") or "the config"
    return f"{leaf}={shown}: no such key; the keys of {holder} are {', '.join(siblings)}"


def other_systems(name: str, known: Sequence[str]) -> list[str]:
    """Returns a line for each key that corresponds to the setting ``name`` of another system.

    Names are compared part by part from the end; dots separate the parts. The settings in other_systems.toml
    that share the most parts with ``name`` match. If they share only the last part, no key in ``known`` may
    end with it. A key is left out if its section is not in ``known``.
    """
    ours = name.rpartition(".")[2] in {key.rpartition(".")[2] for key in known}
    found: dict[int, dict[str, str]] = {0: {}}  # number of common parts -> key -> line
    source = files(__package__).joinpath("other_systems.toml").read_text("utf-8")
    for system, settings in tomllib.loads(source).items():
        for setting, key in settings.items():
            common = len(commonprefix([part.split(".")[::-1] for part in (setting, name)]))
            if (common > ours or setting == name) and key.split(".")[0] in known:
                found.setdefault(common, {}).setdefault(key, f"{system}'s {setting} is {key}")
    return list(found[max(found)].values())
