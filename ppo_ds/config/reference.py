"""Describes the keys of the config, for `--help` and for docs/config.md.

`python -m ppo_ds.config.reference > docs/config.md` generates the page.
"""

from __future__ import annotations

import inspect
import re
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS
from ppo_ds.config.reading import bounds, dotted_keys, section_of, unwrapped
from ppo_ds.config.registry import STAGES, Entry, import_target
from ppo_ds.config.schema import Config
from ppo_ds.config.targets import arguments_of
from ppo_ds.config.text import did_you_mean, show
from ppo_ds.config.types import OneOf, Section, Variants, meaning
from ppo_ds.errors import UserError

_ENTRIES: dict[str, Mapping[str, Entry]] = {"stage": STAGES, "algo.kl.estimator": KL_ESTIMATORS}

_HEAD = """\
# Configuration reference

Every key as `key=default`, or without a default if it is required. Keys of several models stand here once:
`actor.optim.lr` stands for `critic.optim.lr` and `scorer.optim.lr`. The keys of `reward` and `prepare` are
the arguments of their `_target_` ([rewards](rewards.md)). `python launch/train.py --help SECTION` prints a
part of this page, and `python -m ppo_ds.config.reference` generates it.
"""

# name and description of an argument in a docstring; continuation lines are indented further
_ARGUMENTS = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


@dataclass(frozen=True)
class Key:
    """Describes one key of the config in words."""

    name: str  # the full, dotted name
    type: str
    default: str
    description: str


def keys_of(section: type[Section], prefix: str) -> Iterator[Key]:
    """Yields the keys of a section, without the keys of its inner sections."""
    for name, field in section.all_fields().items():
        if section_of(field) is None:
            text, default = meaning(field), show(field.get_default(call_default_factory=True))
            if issubclass(section, Variants) and name not in section.model_fields:
                text += f" Only with {section.tag} {', '.join(section.users(name))}."
            hint, metadata, nullable = unwrapped(field.annotation)
            kind = _words(hint, [*metadata, *field.metadata]) + (" or null" if nullable else "")
            default = "required" if field.is_required() else default
            yield Key(f"{prefix}.{name}".lstrip("."), kind, default, text)


def values() -> dict[str, dict[str, str]]:
    """Maps each key that selects an Entry or a variant to its possible values and their descriptions."""
    tables = {key: {name: one.description for name, one in table.items()} for key, table in _ENTRIES.items()}
    for key, section in sections_of(Config):
        if issubclass(section, Variants):
            variants = {name: " ".join((one.__doc__ or "").split()) for name, one in section.variants.items()}
            tables[f"{key}.{section.tag}"] = variants
    return tables


def sections_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yields the full name and the class of every section inside a section."""
    for name, field in section.all_fields().items():
        if inner := section_of(field):
            full = f"{prefix}.{name}" if prefix else name
            yield full, inner
            yield from sections_of(inner, full)


def _words(hint: Any, metadata: list[Any]) -> str:
    for one in metadata:
        if isinstance(one, OneOf):
            return ", ".join(map(show, one.choices))
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(show, args))
    if origin in (Union, types.UnionType):
        return " or ".join(_words(*unwrapped(one)[:2]) for one in args)
    if origin is list:
        return f"list of {_words(*unwrapped(args[0])[:2])}"
    if origin is tuple:
        return f"list of {len(args)}: {_words(*unwrapped(args[0])[:2])}"
    if isinstance(hint, type) and issubclass(hint, Section):
        return f"sections with keys {', '.join(hint.model_fields)}"
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    return f"{names.get(hint, 'mapping')} {bounds(metadata)}".rstrip()


def help_on(topic: str) -> str:
    """Returns the help text of a key, or of a section with its keys. Raises UserError for other names."""
    sections = dict(sections_of(Config))
    if topic in sections:
        inner = [name for name in sections if name.startswith(f"{topic}.")]
        more = f"\nSections in {topic} (--help describes each): {', '.join(inner)}\n" if inner else ""
        keys = list(keys_of(sections[topic], topic))
        return f"{topic}: {first_line(sections[topic])}\n\n{''.join(map(_entry, keys))}{more}"
    section, _, _ = topic.rpartition(".")
    for key in keys_of(sections.get(section, Config), section):
        if key.name == topic:
            table = values().get(topic, {})
            return _entry(key) + "".join(f"    {name:12}{text}\n" for name, text in table.items())
    known = dotted_keys(Config)
    top = f"; the sections are {', '.join(key for key in known if key in sections and '.' not in key)}"
    raise UserError(f"--help {topic}: no such section or key{did_you_mean(topic, known) or top}")


def help_on_part(name: str, target: str | None) -> str:
    """Describes ``name``, which is reward or prepare, or, if ``target`` is given, the target's arguments.

    Raises UserError if ``target`` cannot be imported.
    """
    (key,) = (key for key in keys_of(Config, "") if key.name == name)
    if target is None:
        args = {"prepare": "+experiment=quickstart --help prepare"}.get(name, "--help reward reward=numeric")
        text = "Its keys are the arguments of its _target_, which is not set. To list them:"
        return f"{_entry(key)}\n{text}\n  python launch/train.py {args}\n"
    try:
        section = arguments_of(import_target(target))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{name}._target_={target}: cannot be imported ({error})") from error
    # the arguments are described where the docstring of the target has a part "Args:"
    listed = (inspect.getdoc(import_target(target)) or "").partition("\nArgs:\n")[2]
    texts = {f"{name}.{argument}": " ".join(text.split()) for argument, text in _ARGUMENTS.findall(listed)}
    keys = [replace(key, description=texts.get(key.name, key.description)) for key in keys_of(section, name)]
    for inner, part in sections_of(section, name):
        keys += keys_of(part, inner)
    return f"{name}: {target}\n\n{''.join(map(_entry, keys))}"


def _entry(key: Key) -> str:
    description = f"    {key.description}\n" if key.description else ""
    return f"  {key.name}\n{description}    Type: {key.type}. Default: {key.default}.\n"


def first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def page() -> str:
    shared = ("model", "zero", "optim", "lora", "ema")  # sections of several models, described together
    groups: dict[str, dict[str, type[Section]]] = {"": {"": Config}}
    for name, section in sections_of(Config):
        last = name.rpartition(".")[2]
        groups.setdefault(last if last in shared else name, {})[name] = section
    return _HEAD + "".join(map(section_text, groups.values()))


def section_text(members: Mapping[str, type[Section]]) -> str:
    """Describes one section, or the sections of several models; ``members`` maps section names to classes."""
    about, found = defaultdict(list), defaultdict(list)  # description -> names; last part of a key -> Keys
    for name, section in members.items():
        about[" ".join((section.__doc__ or "").split())].append(f"`{name}`")
        for key in keys_of(section, name):
            found[key.name.rpartition(".")[2]].append(key)
    texts = [f"{', '.join(names)}: {text}" if len(members) > 1 else text for text, names in about.items()]
    items = [describe_key(keys, len(keys) < len(members)) for keys in found.values()]
    parts = [f"## {', '.join(members) or 'Top level'}", *texts, "\n".join(items)]
    return "\n" + "\n\n".join(parts).rstrip().replace("<", "&lt;") + "\n"


def describe_key(keys: list[Key], some: bool) -> str:
    """Describes a key that several models may have; ``keys`` has an entry for each model that has it.

    ``some`` is True if other models in the same part of the page lack the key.
    """
    key, defaults = keys[0], {one.name.partition(".")[0]: one.default for one in keys}
    kind = key.type.removesuffix(" or null") if key.default == "null" else key.type
    for words, sign in {"at least": "≥", "at most": "≤", "above": ">", "below": "<", "number ": ""}.items():
        kind = kind.replace(words, sign)
    table, only = values().get(key.name, {}), f" Only of {', '.join(defaults)}." if some else ""
    facts = [] if table or kind in ("true or false", "text", "mapping") else [kind]
    facts += [f"{model}: {one}" for model, one in defaults.items() if one not in (key.default, "null")]
    shown = f" ({'; '.join(facts)})" if facts else ""
    text = f"- `{key.name}={key.default}`{shown}: ".replace("=required`", "`") + key.description + only
    return "\n".join([text, *(f"    - `{value}`: {meant}" for value, meant in table.items())])


if __name__ == "__main__":
    print(page(), end="")
