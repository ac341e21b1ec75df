"""Reads the command line into a validated Config.

Hydra composes the groups in conf/; ppo_ds checks types, unknown keys and everything else. Only Hydra's
compose API is used, not its application decorator, so Hydra sets up no logging, working directory or flags.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
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
from ppo_ds.config.reference import OPEN_PARTS, first_line, help_on, help_on_part, keys_of, sections_of
from ppo_ds.config.schema import Config, default_dir, resolved
from ppo_ds.config.text import did_you_mean
from ppo_ds.errors import UserError

CONF = Path(__file__).resolve().parent.parent / "conf"
# Advice that Hydra appends to its errors; it is wrong here, since keys need no plus sign.
HYDRAS_ADVICE = re.compile(
    r"\s*(?:To append|To override|Use \+|You may|Did you mean to override|Either remove|full_key:|object_type"
    r"|Available)"
)
USAGE = """\
deepspeed launch/train.py +experiment=NAME [KEY=VALUE ...] [GROUP=OPTION ...]
(also: torchrun launch/train.py ..., python launch/train.py ...)

  +experiment=NAME      start from conf/experiment/NAME.yaml, e.g. +experiment=quickstart
  KEY=VALUE             set a key, e.g. actor.optim.lr=2e-6
  ~KEY                  reset a key to its default
  GROUP=OPTION          use conf/GROUP/OPTION.yaml, e.g. reward=function reward.path=my_mod.py:score
  GROUP@KEY=OPTION      use it for one section, e.g. model@actor.model=qwen2.5-7b-instruct
  --help SECTION        describe the keys of a section, e.g. --help algo.kl; or one key, e.g. --help run.dir
  --cfg job             print the resolved config and exit
  --config-dir DIR      also look for groups in DIR, e.g. your own DIR/experiment/mine.yaml
  --config-path DIR --config-name NAME
                        use another primary config; RUN_DIR and config repeat the run in RUN_DIR
"""


class Parser(argparse.ArgumentParser):
    """Reports errors of the command line as UserError, like all other errors of the user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


@dataclass(frozen=True)
class _Folders:
    """The folders that configs are read from, the folder of the primary config first."""

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
    """Returns the validated Config of the command line ``argv``, which excludes the program's name.

    Raises UserError with all problems, and SystemExit(0) after --help or --cfg. ``world_size`` defaults to
    the launcher's.
    """
    options = _parser().parse_intermixed_args(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    folders = _folders(options)
    if options.help is not None:
        if is_main:
            _print_help(folders, options)
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
        help="added by the deepspeed launcher; ignored, since the environment has the same value",
    )
    return parser


def _folders(options: argparse.Namespace) -> _Folders:
    if options.multirun:
        raise UserError(
            "--multirun: is not supported, since every rank would run every job; start one run at a time"
        )
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
    """Composes the arguments with Hydra; also returns a line for each argument that Hydra cannot parse."""
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
    except (HydraException, OmegaConfBaseException, OSError) as error:  # OSError: too long for a file name
        raise UserError(*problems, _reworded(error, arguments)) from None


def _defaults_list(file: Path) -> set[str]:
    """Returns the groups in the defaults list of the primary config, with their packages.

    Hydra replaces the options of these groups; options of other groups are added with a plus sign.
    """
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
                f"{argument}: Hydra only composes the config and has no settings here; the run "
                "directory is run.dir"
            )
        else:
            parsed.append(override)
    return parsed, problems


def _parse(argument: str) -> tuple[str, Override] | None:
    """Parses an argument; also returns its text as Hydra accepts it.

    A value that Hydra cannot parse, or reads as a sweep, is quoted as text, since paths contain commas and
    brackets.
    """
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
    """Returns the arguments for Hydra: experiments first, since others override them, then groups and keys.

    Groups get or lose the plus sign as Hydra requires. Keys are always forced, since ppo_ds reports unknown
    keys.
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
            wrong.append(f"{argument}: a second experiment; to combine two, write +experiment=[a,b]")
        else:
            chosen[place] = bare if place in in_list or override.type is OverrideType.DEL else f"+{bare}"
            if override.type is not OverrideType.DEL:
                wrong += _unknown_options(argument, override.value(), folders.options(group), group)
    if wrong:  # Without the right groups, other problems would be misleading.
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
    """Returns an error of Hydra as one line that names the arguments."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    missing = re.search(r"Could not delete(?: from config)?\.? ?'?([\w.@/]+)'?", text)
    if missing:
        return f"~{missing[1]}: nothing to reset; the key has its default already or does not exist"
    text = HYDRAS_ADVICE.split(text)[0]
    return f"{text.rstrip('. ')} (in: {' '.join(arguments) or 'no arguments'})"


# ---- resolving


def _resolve(composed: DictConfig) -> dict[str, Any]:
    """Merges the composed config over the defaults and resolves it; interpolations may use every key."""
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
    """Yields a line for each list in place of a section, or mapping in place of a list.

    OmegaConf cannot merge these. ppo_ds reports all other errors later.
    """
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


def _print_help(folders: _Folders, options: argparse.Namespace) -> None:
    """Describes the section or key after --help, or else the command line, the groups and the sections."""
    topic, arguments = options.help, options.overrides
    if "=" in topic:
        topic, arguments = "", [topic, *arguments]
    if topic:
        part = topic.partition(".")[0]
        chosen: dict[str, Any] = {}
        if part in OPEN_PARTS and arguments:
            composed = OmegaConf.to_container(
                _compose(folders, options.config_name, arguments)[0], resolve=False
            )
            chosen = composed.get(part) or {} if isinstance(composed, dict) else {}
        print(help_on_part(part, chosen.get("_target_")) if part in OPEN_PARTS else help_on(topic), end="")
        return
    print(f"{USAGE}\nGroups and their options:")
    for group in folders.groups():
        print(
            textwrap.fill(
                ", ".join(folders.options(group)),
                110,
                initial_indent=f"  {group:12}",
                subsequent_indent=" " * 14,
                break_on_hyphens=False,
            )
        )
    print("\nSections (--help SECTION describes the keys):")
    for name, section in sections_of(Config):
        if "." not in name:
            print(f"  {name:12}{first_line(section)}")
    print(f"\nOther keys: {', '.join(key.name for key in keys_of(Config, ''))}")
