"""Prints the help of the command line: its usage, the groups and the keys of the config."""

from __future__ import annotations

import textwrap
from typing import Any

from omegaconf import OmegaConf

from launch.composing import Folders, compose_config
from ppo_ds.commands.entry_points import command, script
from ppo_ds.config.reference import first_line, help_on, help_on_part, keys_of, sections_of
from ppo_ds.config.schema import OPEN_PARTS, Config

USAGE = f"""\
deepspeed {script("train")} +experiment=NAME [KEY=VALUE ...] [GROUP=OPTION ...]
(also: torchrun {script("train")} ..., {command("train")} ...)

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


def print_help(folders: Folders, config_name: str, topic: str, arguments: list[str]) -> None:
    """Prints the help on a section or key, or without a topic, on the command line, groups and sections."""
    part = topic.partition(".")[0]
    if part in OPEN_PARTS:
        composed: Any = {}
        if arguments:
            tree = compose_config(folders, config_name, arguments)[0]
            composed = OmegaConf.to_container(tree, resolve=False)
        print(help_on_part(part, (composed.get(part) or {}).get("_target_")), end="")
        return
    if topic:
        print(help_on(topic), end="")
        return
    print(f"{USAGE}\nGroups and their options:")
    for group in folders.groups():
        options = ", ".join(folders.options(group))
        lines = textwrap.wrap(options, 110 - 14, break_on_hyphens=False)
        print(f"  {group:12}" + f"\n{' ' * 14}".join(lines))
    print("\nSections (--help SECTION describes the keys):")
    for name, section in sections_of(Config):
        if "." not in name:
            print(f"  {name:14}{first_line(section)}")
    print(f"\nOther keys: {', '.join(key.name for key in keys_of(Config, ''))}")
