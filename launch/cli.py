"""From the command line to a sound Config. Hydra composes the groups in conf/; types, unknown keys and
everything else are judged by ppo_ds.

Hydra's compose API is used, not its application decorator: no logging, no working directory and no flags of
its own.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppo_ds.config.checks import validated
from ppo_ds.config.reading import defaults
from ppo_ds.config.reference import help_on, outline, sections_of
from ppo_ds.config.schema import Config, default_dir, resolved
from ppo_ds.config.text import did_you_mean
from ppo_ds.errors import UserError

CONF = Path(__file__).resolve().parent.parent / "conf"
# What Hydra appends to its complaints; its keys and plus signs are not this program's.
HYDRAS_ADVICE = re.compile(
    r"\s*(?:To append|To override|Use \+|You may|Did you mean to override|Either remove|full_key:|object_type|Available)"
)
USAGE = """\
deepspeed launch/train.py +experiment=NAME [KEY=VALUE ...] [GROUP=OPTION ...]
(also: torchrun launch/train.py ..., python launch/train.py ...)

  KEY=VALUE             set a key, e.g. actor.optim.lr=2e-6          ~KEY   back to the default
  GROUP=OPTION          choose a file of conf/, e.g. reward=function reward.path=my_mod.py:score
  GROUP@KEY=OPTION      the same for one place, e.g. model@actor.model=qwen2.5-7b-instruct
  --help SECTION|KEY    describe the keys of a section, e.g. --help algo.kl
  --cfg job             print the resolved config and exit
  --config-dir DIR      look for groups in DIR too (your own DIR/experiment/mine.yaml)
  --config-path DIR --config-name NAME
                        another primary config; a run again: --config-path RUN_DIR --config-name config
"""


class Parser(argparse.ArgumentParser):
    """Mistakes on a command line are the user's like all others: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


@dataclass(frozen=True)
class _Folders:
    """Where configs come from: the primary one first."""

    paths: tuple[Path, ...]

    def options(self, group: str) -> list[str]:
        return sorted({file.stem for path in self.paths for file in (path / group).glob("*.yaml")})

    def groups(self) -> list[str]:
        return sorted(
            {
                folder.name
                for path in self.paths
                for folder in path.iterdir()
                if folder.is_dir() and any(folder.glob("*.yaml"))
            }
        )


def load_config(argv: list[str], world_size: int | None = None) -> Config:
    """The validated Config of the command line ``argv`` (without the program's name).

    Raises UserError with all the problems, or SystemExit(0) after --help or --cfg. ``world_size`` defaults to
    what the launcher says.
    """
    options = _parser().parse_intermixed_args(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    folders = _folders(options)
    if options.help is not None:
        topic = options.help if "=" not in options.help else ""
        print(_help(folders, topic) if is_main else "", end="")
        raise SystemExit(0)
    composed, problems = _compose(folders, options.config_name, options.overrides)
    try:
        config = validated(_resolve(composed), world_size or int(os.environ.get("WORLD_SIZE", "1")))
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    if problems:
        raise UserError(*problems)
    if options.cfg:
        print(to_yaml(resolved(config)) if is_main else "", end="")
        raise SystemExit(0)
    return config


def to_yaml(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=150)


def _parser() -> Parser:
    parser = Parser(prog="launch/train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-path", "-cp", default=str(CONF))
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        help="put there by the deepspeed launcher; the environment says the same",
    )
    return parser


def _folders(options: argparse.Namespace) -> _Folders:
    if options.multirun:
        raise UserError("--multirun: every rank would run every job; start one run at a time")
    for flag, folder in (("--config-path", options.config_path), ("--config-dir", options.config_dir)):
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"{flag}={folder}: no such directory")
    folders = _Folders(
        tuple(
            dict.fromkeys(
                Path(path).resolve() for path in (options.config_path, options.config_dir, CONF) if path
            )
        )
    )
    name = options.config_name.removesuffix(".yaml")
    if options.help is None and not (folders.paths[0] / f"{name}.yaml").is_file():
        raise UserError(f"--config-name={options.config_name}: no {name}.yaml in {folders.paths[0]}")
    return folders


# ---- composing


def _compose(folders: _Folders, name: str, arguments: list[str]) -> tuple[DictConfig, list[str]]:
    """What Hydra makes of the arguments, and those that it was not given because they make no sense."""
    name = name.removesuffix(".yaml")
    parsed, problems = _parse_all(arguments)
    overrides = _overrides(parsed, folders, _defaults_list(folders.paths[0] / f"{name}.yaml"), problems)
    if folders.paths[1:]:
        quoted = ",".join(f"'file://{path}'" for path in folders.paths[1:])
        overrides.insert(0, f"hydra.searchpath=[{quoted}]")
    try:
        with initialize_config_dir(str(folders.paths[0]), version_base="1.3", job_name="ppo_ds"):
            return compose(name, overrides), problems
    except yaml.YAMLError as error:
        raise UserError(*problems, f"not valid YAML: {' '.join(str(error).split())}") from None
    except (
        HydraException,
        OmegaConfBaseException,
        OSError,
    ) as error:  # OSError: a key that is too long to be looked for as a file
        raise UserError(*problems, _reworded(error, arguments)) from None


def _defaults_list(file: Path) -> set[str]:
    """The groups, with their package, that the primary config has in its defaults list: these are swapped, the others are added."""
    try:
        entries = (yaml.safe_load(file.read_text()) or {}).get("defaults", [])
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    return {str(key).split()[-1].lstrip("/") for entry in entries if isinstance(entry, dict) for key in entry}


def _parse_all(arguments: list[str]) -> tuple[list[tuple[str, Override]], list[str]]:
    parsed, problems = [], []
    for argument in arguments:
        override = _parse(argument)
        if override is None:
            problems.append(
                f"{argument}: not understood; write KEY=VALUE, GROUP=OPTION, +experiment=NAME or ~KEY"
            )
        elif re.match(r"hydra\b", override[1].key_or_group):
            problems.append(
                f"{argument}: there is nothing to set in Hydra, it only composes the config; the run "
                "directory is run.dir"
            )
        else:
            parsed.append(override)
    return parsed, problems


def _parse(argument: str) -> tuple[str, Override] | None:
    """The argument and what it says. A value that Hydra cannot read, or takes for a sweep, is meant as text: paths hold commas and brackets."""
    parser = OverridesParser.create()
    key, equals, value = argument.partition("=")
    quoted = value.replace("'", "\\'")
    for text in (argument, f"{key}='{quoted}'") if equals else (argument,):
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue
        if override.key_or_group and not override.is_sweep_override():
            return text, override
    return None


def _overrides(
    parsed: list[tuple[str, Override]], folders: _Folders, in_list: set[str], problems: list[str]
) -> list[str]:
    """The arguments as Hydra is to see them: experiments first, so that other groups win over them; then
    groups, then keys.

    Groups get the + that they need or lose the one that they do not; keys are always forced, since unknown
    ones are the validator's to judge.
    """
    chosen: dict[str, str] = {}
    keys: list[str] = []
    wrong: list[str] = []
    for argument, override in parsed:
        group, bare = override.key_or_group, argument.lstrip("+")
        place = group if override.package is None else f"{group}@{override.package}"
        if group not in folders.groups() and override.package is None:
            keys.append(argument if override.type is OverrideType.DEL else f"++{bare}")
        elif group not in folders.groups():
            wrong.append(
                f"{argument}: no such group; the groups are "
                f"{', '.join(folders.groups())}{did_you_mean(group, folders.groups())}"
            )
        elif place == "experiment" and place in chosen:
            wrong.append(f"{argument}: a second experiment; to put one over the other: +experiment=[a,b]")
        else:
            chosen[place] = bare if place in in_list or override.type is OverrideType.DEL else f"+{bare}"
            if override.type is not OverrideType.DEL:
                wrong += _unknown_options(argument, override.value(), folders.options(group), group)
    if wrong:  # what follows from a group that is not there is not worth reading
        raise UserError(*problems, *wrong)
    return [*sorted(chosen.values(), key=lambda text: not text.startswith("+experiment=")), *keys]


def _unknown_options(argument: str, value: Any, options: list[str], group: str) -> Iterator[str]:
    for name in value if isinstance(value, list) else [value]:
        if str(name).removesuffix(".yaml") not in options:
            yield (
                f"{argument}: no such {group}; available: "
                f"{', '.join(options)}{did_you_mean(str(name), options)}"
            )


def _reworded(error: Exception, arguments: list[str]) -> str:
    """Hydra's complaint as one line that speaks of this program's arguments."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    missing = re.search(r"Could not delete(?: from config)?\.? ?'?([\w.@/]+)'?", text)
    if missing:
        return f"~{missing[1]}: nothing to remove, the key has its default already"
    text = HYDRAS_ADVICE.split(text)[0]
    return f"{text.rstrip('. ')} (in: {' '.join(arguments) or 'no arguments'})"


# ---- resolving


def _resolve(composed: DictConfig) -> dict[str, Any]:
    """The composed tree over the defaults of the dataclasses, so that interpolations may point at any key, as a plain dict."""
    base, given = defaults(Config), OmegaConf.to_container(composed, resolve=False)
    misshapen = list(_misshapen(base, given))
    if misshapen:
        raise UserError(*misshapen)
    tree = OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(given))
    assert isinstance(tree, DictConfig)
    run = tree.get("run")
    if isinstance(run, DictConfig) and run.get("dir") is None:
        run.dir = default_dir("${run.name}")
    problems = list(_broken_interpolations(tree))
    if problems:
        raise UserError(*problems)
    plain = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(plain, dict)
    return plain


def _misshapen(base: Any, given: Any, key: str = "") -> Iterator[str]:
    """Lists where sections are due, and mappings where lists are: OmegaConf cannot merge these. All else is the validator's to judge."""
    if isinstance(base, (list, tuple)) and isinstance(given, dict):
        value = ",".join(f"{name}:{part}" for name, part in given.items())
        yield f"{key}={{{value}}}: must be a list, as in {key}=[{{{value}}}]"
    elif isinstance(base, dict) and isinstance(given, list):
        yield f"{key}=[{','.join(map(str, given))}]: must be a mapping, as in {key}.KEY=VALUE"
    elif isinstance(base, dict) and isinstance(given, dict):
        for name in given:
            if name in base:
                yield from _misshapen(base[name], given[name], f"{key}.{name}" if key else name)


def _broken_interpolations(node: Any, prefix: str = "") -> Iterator[str]:
    names = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for name in names:
        key = f"{prefix}{name}" if isinstance(node, DictConfig) else f"{prefix.rstrip('.')}[{name}]"
        try:
            child = node[name] if not OmegaConf.is_missing(node, name) else None
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)[name]
            yield f"{key}={raw}: {str(error).splitlines()[0]}"
            continue
        if OmegaConf.is_config(child):
            yield from _broken_interpolations(child, f"{key}.")


# ---- help


def _help(folders: _Folders, topic: str) -> str:
    """Describes a section or a key of the config; without a topic the command line, the groups and the sections."""
    if topic:
        return help_on(topic)
    groups = "\n".join(f"  {group:12}{', '.join(folders.options(group))}" for group in folders.groups())
    sections = "\n".join(
        f"  {name:12}{outline(section)}" for name, section in sections_of(Config) if "." not in name
    )
    return f"{USAGE}\ngroups:\n{groups}\n\nsections (--help SECTION or KEY describes one):\n{sections}\n"
