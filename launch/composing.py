"""Composes the groups in conf/ and the arguments of the command line with Hydra.

Only Hydra's compose API is used, not its application decorator, so Hydra sets up no logging, working
directory or flags. Hydra only parses and composes; ppo_ds checks types, unknown keys and everything else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppo_ds.commands.entry_points import command
from ppo_ds.config.reading import dotted_keys, with_defaults
from ppo_ds.config.schema import Config, default_dir
from ppo_ds.config.text import did_you_mean
from ppo_ds.config.types import leaves
from ppo_ds.errors import UserError

# Groups whose options set keys of every stage. Keys that the stage of a run does not use are left out.
STAGE_GROUPS = ("zero", "debug")

# Names in other trainers -> options here, which the search for similar names would not find
OWN_NAMES = {"ppo": "standard"}

# Advice that Hydra appends to its errors; it is wrong here, since keys need no plus sign.
HYDRAS_ADVICE = re.compile(
    r"\s*(?:To append|To override|Use \+|You may|Did you mean to override|Either remove|full_key:|object_type"
    r"|Available)"
)
# Keys of the evaluation, and the values that they get if there are no held-out data.
WITHOUT_EVALUATION = {
    "data.eval_path": None,
    "eval.every": None,
    "eval.patience": None,
    "checkpoint.keep_best": False,
    "checkpoint.best_by": None,
}
EXAMPLES = Path(str(files("ppo_ds"))) / "examples"
# ${example:FILE} in a config is the absolute path of a data file of the package.
OmegaConf.register_new_resolver("example", lambda name: str(EXAMPLES / name), replace=True)
# ${equal:A,B} is true if A equals B. conf/reward/minimind.yaml uses it to trust the code of one model only.
OmegaConf.register_new_resolver("equal", lambda one, other: one == other, replace=True)


@dataclass(frozen=True)
class Folders:
    """The folders from which configs are read; the folder of the primary config is the first."""

    paths: tuple[Path, ...]

    def options(self, group: str) -> list[str]:
        return sorted({file.stem for path in self.paths for file in (path / group).glob("*.yaml")})

    def groups(self) -> list[str]:
        folders = [folder for path in self.paths for folder in path.iterdir() if folder.is_dir()]
        return sorted({each.name for each in folders if any(each.glob("*.yaml"))} - {"pipeline"})


def compose_config(folders: Folders, name: str, arguments: list[str]) -> tuple[DictConfig, list[str]]:
    """Composes the primary config and the arguments.

    The config is composed without unusable arguments; the second result has an error line for each of them.
    Raises UserError if nothing can be composed.
    """
    overrides, problems = _parse(arguments)
    chosen = _in_order(overrides, folders, _default_groups(folders.paths[0] / f"{name}.yaml"), problems)
    if folders.paths[1:]:
        quoted = ",".join(f"'file://{path}'" for path in folders.paths[1:])
        chosen.insert(0, f"hydra.searchpath=[{quoted}]")
    while True:
        try:
            with initialize_config_dir(str(folders.paths[0]), version_base="1.3", job_name="ppo_ds"):
                composed = compose(name, chosen, return_hydra_config=True)
                _drop_evaluation_of_other_data(composed, name, chosen)
                _drop_other_length(composed, chosen)
                return _of_its_stage(composed, folders), problems
        except yaml.YAMLError as error:
            raise UserError(*problems, f"not valid YAML: {' '.join(str(error).split())}") from None
        except (HydraException, OmegaConfBaseException, OSError) as error:  # OSError: file name too long
            text = " ".join(str(getattr(error, "strerror", None) or error).split())
        failed = [one for one in chosen if one[0] == "~" and f"'{one[1:].partition('=')[0]}'" in text]
        if not failed:
            reason = HYDRAS_ADVICE.split(text)[0].rstrip(". ")
            raise UserError(*problems, f"{reason} (in: {' '.join(arguments) or 'no arguments'})")
        # The config is composed without the failed argument, so that all problems are found.
        chosen.remove(failed[0])
        has_value = " or another value" if "=" in failed[0] else ""
        problems.append(
            f"{failed[0]}: nothing to reset; the key has its default already{has_value} or does not exist"
        )


def _drop_evaluation_of_other_data(composed: DictConfig, name: str, chosen: list[str]) -> None:
    """Removes the held-out data of a config file if the user replaces the training data of that file.

    The file's held-out rows belong to the file's data set. So data.path=... without data.eval_path=... also
    resets the keys of WITHOUT_EVALUATION, except for those that the user sets. To find the data sets of the
    file, the config is composed again without the user's keys.
    """
    keys = [text for text in chosen if text.startswith(("++", "~"))]
    given = {text.lstrip("+~").partition("=")[0] for text in keys}
    replaced = given & {"data.path", "data.mix"} and "data.eval_path" not in given
    if not replaced or not _data_of(composed)["eval_path"]:
        return
    files = _data_of(compose(name, [text for text in chosen if text not in keys]))
    if not (files["path"] or files["mix"]) or files == _data_of(composed):
        return
    for key, value in WITHOUT_EVALUATION.items():
        if key not in given:
            OmegaConf.update(composed, key, value, force_add=True)


def _drop_other_length(composed: DictConfig, chosen: list[str]) -> None:
    """Lets run.steps of the command line replace run.epochs of a config file, and vice versa."""
    given = dict(text.lstrip("+").partition("=")[::2] for text in chosen)
    for key, other in (("run.steps", "run.epochs"), ("run.epochs", "run.steps")):
        if given.get(key, "null") != "null" and other not in given:
            OmegaConf.update(composed, other, None, force_add=True)


def _data_of(composed: DictConfig) -> dict[str, Any]:
    section = composed.get("data")
    given: Any = OmegaConf.to_container(section, resolve=False) if isinstance(section, DictConfig) else {}
    return {key: given.get(key) for key in ("path", "mix", "eval_path")}


def _of_its_stage(composed: DictConfig, folders: Folders) -> DictConfig:
    """Returns a composed config without Hydra's settings and without unused keys from STAGE_GROUPS.

    A key is unused if the stage does not have it. If its value differs from that in the chosen option of the
    group, the user has set it, so it is kept and later reported as an error.
    """
    given: Any = OmegaConf.to_container(composed, resolve=False)
    chosen = given.pop("hydra")["runtime"]["choices"]
    unused = {*dotted_keys(Config)} - {*dotted_keys(Config.variant_of(given))}
    for group in STAGE_GROUPS:
        files = [path / group / f"{chosen.get(group)}.yaml" for path in folders.paths]
        file = next((file for file in files if file.is_file()), None)
        keys: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if file else {}
        for (*sections, name), value in leaves(keys) if keys else ():
            section = given
            for inner in sections:
                section = section.get(inner) or {}
            if section.get(name) == value and ".".join([*sections, name]) in unused:
                del section[name]
    return OmegaConf.create(given)


def _parse(arguments: list[str]) -> tuple[list[tuple[str, Override]], list[str]]:
    """Returns (text, override) for each argument that Hydra can parse, and an error line for each other one.

    The text is the argument itself. If Hydra cannot parse it or reads it as a sweep, its value is quoted
    first, since paths may contain commas and brackets.
    """
    parser = OverridesParser.create()
    parsed: list[tuple[str, Override]] = []
    problems: list[str] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        quoted = value.replace("'", "\\'")
        for text in (argument, f"{key}='{quoted}'") if equals else (argument,):
            try:
                override = parser.parse_override(text)
            except HydraException:
                continue
            if override.key_or_group and not override.is_sweep_override():
                break
        else:
            problems.append(
                f"{argument}: not understood; write KEY=VALUE, GROUP=OPTION, +experiment=NAME or ~KEY"
            )
            continue
        if override.key_or_group == "pipeline":
            raise UserError(
                f"{argument}: a pipeline consists of several runs; start it with "
                f"{command('pipeline')} +{argument.lstrip('+')}"
            )
        if re.match(r"hydra\b", override.key_or_group):
            problems.append(
                f"{argument}: Hydra only composes the config and has no settings here; the run "
                "directory is run.dir"
            )
        else:
            parsed.append((text, override))
    return parsed, problems


def _default_groups(file: Path) -> set[str]:
    """Returns the groups, with their packages, for which the primary config ``file`` chooses an option.

    An argument for one of these groups replaces the option; for other groups Hydra requires a plus sign.
    """
    try:
        entries = (yaml.safe_load(file.read_text()) or {}).get("defaults", [])
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    return {str(key).split()[-1].lstrip("/") for entry in entries if isinstance(entry, dict) for key in entry}


def _in_order(
    parsed: list[tuple[str, Override]], folders: Folders, in_list: set[str], problems: list[str]
) -> list[str]:
    """Orders the arguments for Hydra: first the experiment, which others override, then groups, then keys.

    Groups get a plus sign unless ``in_list``, the groups of the defaults list, contains them. Keys get ++,
    so that Hydra accepts even unknown keys, which ppo_ds reports later.
    """
    chosen: dict[str, str] = {}
    keys: list[str] = []
    wrong: list[str] = []
    for argument, override in parsed:
        group, bare = override.key_or_group, argument.lstrip("+")
        place = group if override.package is None else f"{group}@{override.package}"
        deletes = override.type is OverrideType.DEL
        if group not in folders.groups() and override.package is None:
            keys.append(argument if deletes else f"++{bare}")
        elif group not in folders.groups():
            wrong.append(
                f"{argument}: no such group; the groups are "
                f"{', '.join(folders.groups())}{did_you_mean(group, folders.groups())}"
            )
        elif place == "experiment" and place in chosen:
            wrong.append(f"{argument}: a second experiment; to combine two, write +experiment=[a,b]")
        else:
            chosen[place] = bare if place in in_list or deletes else f"+{bare}"
            options, value = folders.options(group), override.value()
            for name in () if deletes else value if isinstance(value, list) else [value]:
                if str(name) not in options:
                    meant = OWN_NAMES.get(str(name).lower(), str(name))
                    wrong.append(
                        f"{argument}: no such {group}; available: "
                        f"{', '.join(options)}{did_you_mean(meant, options)}"
                    )
    if wrong:  # further checks would report only consequences of the wrong group
        raise UserError(*problems, *wrong)
    return [*sorted(chosen.values(), key=lambda text: not text.startswith("+experiment=")), *keys]


def resolve_config(composed: DictConfig) -> dict[str, Any]:
    """Merges a composed config over the defaults and resolves interpolations, which may refer to any key."""
    given: Any = OmegaConf.to_container(composed, resolve=False)
    merged = with_defaults(Config, given)
    if "${" not in str(merged):
        return merged
    tree = OmegaConf.create(merged)
    if isinstance(tree.get("run"), DictConfig):
        if tree.run.get("name") is None:
            tree.run.name = tree.stage
        if tree.run.get("dir") is None:
            tree.run.dir = default_dir("${run.name}")
    try:
        plain: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{error.full_key}: {str(error).splitlines()[0]}; correct the interpolation"
        ) from None
    return plain
