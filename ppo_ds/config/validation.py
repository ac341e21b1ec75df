"""Checks a whole config before anything is loaded: types, rules between keys, files on this machine.

All problems are reported together. The rules are in checks/, with one function per subject.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ppo_ds.config.chat_template import template_text
from ppo_ds.config.checks import algo, data, evaluation, models, needs, reward, run, vllm
from ppo_ds.config.reading import dotted_keys, read
from ppo_ds.config.schema import Config, PPOConfig, TextConfig, inherit, load_own_code
from ppo_ds.config.types import replace
from ppo_ds.errors import UserError
from ppo_ds.secrets import secrets_in

# A check takes a config and the number of ranks, and yields an error line for every problem. The line lists
# all keys involved.
Check = Callable[[Any, int], Iterator[str]]

# check -> the class of the configs to which it applies
CHECKS: dict[Check, type[Config]] = {
    run.check_run: Config,
    data.check_sampling: PPOConfig,
    vllm.check_vllm: PPOConfig,
    algo.check_batches: PPOConfig,
    models.check_generation: PPOConfig,
    models.check_raw_deepspeed: Config,
    models.check_bitsandbytes: Config,
    models.check_initial_critic: PPOConfig,
    reward.check_reward: PPOConfig,
    reward.check_prepare: Config,
    algo.check_losses: PPOConfig,
    algo.check_rollout_is: PPOConfig,
    algo.check_values: PPOConfig,
    algo.check_estimator: PPOConfig,
    algo.check_groups: PPOConfig,
    algo.check_partial: PPOConfig,
    evaluation.check_best_checkpoint: Config,
    evaluation.check_eval_rewards: PPOConfig,
    data.check_paths: TextConfig,
    data.check_tasks: TextConfig,
    needs.check_needs: Config,
}


def validated(tree: dict[str, Any], ranks: int) -> Config:
    """Returns the complete Config for a plain nested dict. Raises UserError with all of its problems."""
    if secrets := list(secrets_in(tree)):  # no other problem is reported, since its line could print a secret
        raise UserError(*secrets)
    load_own_code(tree)
    config, wrong = read(Config, tree)
    if "stage" in wrong:  # all other checks depend on the sections that a stage has
        raise UserError(wrong["stage"])
    config = inherit(config)
    try:
        if isinstance(config, TextConfig) and config.data.chat_template is not None:
            text = template_text(config.data.chat_template)
            config = replace(config, data=replace(config.data, chat_template=text))
    except UserError as error:
        wrong = wrong | {"data.chat_template": str(error)}
    # Drop further lines about a key with a wrong value: they would be about the value that replaced it.
    known = {re.split(r"[#\[]", key)[0] for key in wrong} & set(dotted_keys(type(config)))
    named = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in known) or r"(?!)")
    try:
        follow_ups = [line for line in problems(config, ranks) if not named.search(line)]
    except OSError as error:  # a name that is too long, or a folder that may not be searched
        raise UserError(f"{error.filename}: {error.strerror}; give another path") from error
    if wrong or follow_ups:
        raise UserError(*wrong.values(), *follow_ups)
    return config


def problems(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for every conflict between keys, and every missing or unusable file or folder."""
    for check, kind in CHECKS.items():
        if isinstance(config, kind):
            yield from check(config, ranks)
