"""Reads the command line into a validated Config."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml

from launch.composing import Folders, compose_config, resolve_config
from ppo_ds.commands.entry_points import INSTALLED, command
from ppo_ds.config.schema import Config, PPOConfig, resolved
from ppo_ds.config.types import replace
from ppo_ds.config.validation import validated
from ppo_ds.errors import UserError
from ppo_ds.tools.model_argument import NamedModel

CONF = Path(__file__).resolve().parent.parent / "conf"

MAX_NEW_TOKENS = 512  # unless sampling.max_new_tokens is set
UNUSED_REWARD = {"_target_": "ppo_ds.rewards.rules.LengthReward", "longest": 1}
NO_ARGUMENTS = "no arguments were given: begin with an experiment, as in +experiment=rlhf (--help lists them)"


class Parser(argparse.ArgumentParser):
    """Parses a command line; raises UserError for errors. Usage texts show the installed command, if any."""

    def __init__(self, *, prog: str, **options: Any):
        shown = command(Path(prog).stem) if INSTALLED else prog
        super().__init__(prog=shown, allow_abbrev=False, **options)

    def add_trust(self) -> None:
        self.add_argument(
            "--trust-remote-code",
            action="store_true",
            help="run the Python code of models that the run's config trusts",
        )

    def error(self, message: str) -> NoReturn:
        key = re.fullmatch(r"unrecognized arguments: --(\w+(?:\.\w+)+=\S*)", message)
        raise UserError(f"{message}; did you mean {key[1]}?" if key else f"{message}; see --help")


def load_config(argv: list[str], world_size: int | None = None) -> Config:
    """Returns the validated Config of the command line ``argv``, which excludes the program's name.

    Raises UserError with all problems, and SystemExit(0) after --help or --cfg. ``world_size`` defaults to
    the environment variable WORLD_SIZE, which launchers set.
    """
    options = parse_options(argv)
    is_main = os.environ.get("RANK", "0") == "0"
    folders = find_folders(options)
    name = options.config_name.removesuffix(".yaml")
    if options.help is not None:
        from launch.help import print_help  # imported only here, since a run does not need it

        if is_main:
            try:
                print_help(folders, name, options.help, options.overrides)
                sys.stdout.flush()
            except BrokenPipeError:  # the reader has ended, as in --help | head
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(0)
    if not (folders.paths[0] / f"{name}.yaml").is_file():
        raise UserError(f"--config-name={options.config_name}: no {name}.yaml in {folders.paths[0]}")
    composed, problems = compose_config(folders, name, options.overrides)
    ranks = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = validated(resolve_config(composed), ranks)
    except UserError as error:
        start = [] if options.overrides else [NO_ARGUMENTS]
        raise UserError(*problems, *error.problems, *start) from None
    if problems:
        raise UserError(*problems)
    if options.cfg:
        print(to_yaml(resolved(config)) if is_main else "", end="")
        raise SystemExit(0)
    return config


def parse_options(
    argv: list[str], prog: str = "launch/train.py", parents: Sequence[Parser] = ()
) -> argparse.Namespace:
    """Parses the common flags and those of ``parents``; the arguments for Hydra become ``overrides``."""
    parser = Parser(prog=prog, add_help=False, parents=parents)
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
    options = parser.parse_intermixed_args(argv)
    if options.help and "=" in options.help:  # --help +experiment=rlhf: an override, no topic
        options.help, options.overrides = "", [options.help, *options.overrides]
    if options.multirun:
        raise UserError(
            "--multirun: is not supported, since every rank would run every job; start one run at a time"
        )
    return options


def find_folders(options: argparse.Namespace) -> Folders:
    """Returns the folders from which configs are read. Raises UserError if one does not exist."""
    for flag, folder in (("--config-path", options.config_path), ("--config-dir", options.config_dir)):
        if folder is not None and not os.path.isdir(folder):
            raise UserError(f"{flag}={folder}: no such directory")
    paths = [Path(path).resolve() for path in (options.config_path, options.config_dir, CONF) if path]
    return Folders(tuple(dict.fromkeys(paths)))


# ---- evaluate.py and chat.py, whose arguments begin with models


def split_models(arguments: list[str]) -> tuple[list[str], list[str], str | None]:
    """Returns the models, the arguments for Hydra, and the actor.model.path that the latter set, or None."""
    models = [one for one in arguments if os.path.exists(one) or ("=" not in one and one[:1] not in "+~")]
    overrides = [text for text in arguments if text not in models]
    base = next((text.partition("=")[2] for text in overrides if text.startswith("actor.model.path=")), None)
    return models, overrides, base


def used_paths(models: list[NamedModel]) -> set[str]:
    return {path for model in models for path in (model.path, model.tokenizer_path)}


def compose_for_models(
    options: argparse.Namespace,
    overrides: list[str],
    models: list[NamedModel],
    out: Path,
    reward_optional: bool,
) -> tuple[PPOConfig, bool]:
    """Composes and checks the config of an evaluation or a chat, and returns whether it has a reward.

    ``models`` are from the command line; ``out`` is the folder of results. Raises UserError with all
    problems.
    """
    folders = find_folders(options)
    composed, problems = compose_config(folders, options.config_name.removesuffix(".yaml"), overrides)
    tree = resolve_config(composed)
    if tree.get("stage", "ppo") != "ppo":
        raise UserError(f"stage={tree['stage']}: an evaluation needs stage=ppo, whose sampling it uses")
    has_reward = bool(tree.get("reward"))
    if reward_optional and not has_reward:
        tree["reward"] = UNUSED_REWARD
    unused = ""
    with suppress(TypeError, AttributeError):  # a section that is not a mapping, which the checks report
        unused = complete_for_models(tree, models, out)
    try:
        config = validated(tree, 1)
    except UserError as error:
        own = [line for line in error.problems if not (unused and line.startswith(f"{unused}="))]
        raise UserError(*problems, *own) from None
    if problems:
        raise UserError(*problems)
    assert isinstance(config, PPOConfig)  # by its stage
    if unused == "data.eval_path":
        config = replace(config, data=replace(config.data, eval_path=None))
    return config, has_reward


def complete_for_models(tree: dict[str, Any], models: list[NamedModel], out: Path) -> str:
    """Sets the keys of a config that only training needs, and the defaults of an evaluation.

    The checks of a run require training data and, for eval.rewards, held-out prompts. The evaluation uses
    only data.eval_path if it is set, else only data.path. The unused key gets the value of the used key, so
    that the checks pass; but with data.mix, data.path is not set. Returns the name of the unused key.
    """
    actor = tree["actor"]["model"]
    if actor.get("path") not in used_paths(models):  # an experiment's own model, which need not exist
        if actor.get("path") is not None:
            actor["revision"] = None  # it is that of the experiment's model
        actor["path"] = models[0].path
    tree["rollout"].setdefault("prompts_per_step", 1)
    tree["sampling"].setdefault("max_new_tokens", MAX_NEW_TOKENS)
    if tree["run"]["steps"] is None and tree["run"]["epochs"] is None:
        tree["run"]["steps"] = 1
    tree["run"] |= {"dir": str(out), "resume": "auto", "dry_run": False}
    tree["eval"]["every"], tree["checkpoint"]["keep_best"], tree["prepare"] = None, False, None
    data = tree["data"]
    if data["eval_path"] is None:
        data["eval_path"] = data["path"]
        return "data.eval_path"
    if not data["mix"]:
        data["path"] = data["eval_path"]
    return "data.path"


def to_yaml(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=150)
