"""Checks a whole config: types, rules between keys, and files on this machine, before anything is loaded.

All problems are reported together. The rules are in checks/, one function for each subject.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ppo_ds.config.chat_template import with_template_text
from ppo_ds.config.checks import algo, data, evaluation, models, reward, run, vllm
from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.schema import Config, from_tree, inherit
from ppo_ds.errors import UserError
from ppo_ds.secrets import secrets_in

# A check takes a config and the number of ranks, and yields an error line for every problem. The line names
# all keys involved.
Check = Callable[[Config, int], Iterator[str]]

# Check -> the sections that it reads besides the shared ones (schema.SHARED). It is skipped for a stage that
# lacks any of them.
CHECKS: dict[Check, tuple[str, ...]] = {
    run.check_length: (),
    data.check_sampling: ("sampling",),
    vllm.check_vllm: ("actor", "rollout", "sampling"),
    algo.check_batches: ("rollout", "algo"),
    models.check_zero: (),
    models.check_generation: ("actor", "critic", "rollout", "algo"),
    models.check_adapters: (),
    models.check_raw_deepspeed: (),
    models.check_node_copies: (),
    models.check_initial_critic: ("actor", "critic"),
    models.check_critic_from_reward: ("critic", "reward"),
    reward.check_reward: ("reward",),
    reward.check_environment_reward: ("rollout", "reward"),
    reward.check_shaping_of_turns: ("reward", "algo"),
    reward.check_prepare: (),
    algo.check_kl: ("rollout", "algo"),
    algo.check_policy_loss: ("algo",),
    algo.check_loss: ("sampling", "algo"),
    algo.check_rollout_is: ("algo",),
    algo.check_old_logprobs: ("critic", "algo"),
    algo.check_values: ("critic", "algo"),
    algo.check_scores: ("algo",),
    algo.check_parts: ("reward", "algo"),
    algo.check_critic_training: ("critic", "algo"),
    algo.check_groups: ("rollout", "algo"),
    data.check_prompts: ("data",),
    algo.check_ptx: ("rollout", "data", "algo"),
    run.check_unused_keys: (),
    evaluation.check_best_checkpoint: (),
    evaluation.check_eval_rewards: ("data", "reward"),
    run.check_printed_answers: (),
    data.check_model_folders: (),
    data.check_reference_folder: ("actor", "reference", "algo"),
    data.check_reward_folders: ("reward",),
    data.check_data_files: ("data",),
    run.check_run_directory: (),
    run.check_dry_run: (),
}


def validated(tree: dict[str, Any], ranks: int) -> Config:
    """Returns the complete Config of a plain nested dict. Raises UserError with every problem in it."""
    if secrets := list(secrets_in(tree)):  # only these are reported: other lines could print a secret
        raise UserError(*secrets)
    config, wrong = from_tree(tree)
    if "stage" in wrong:  # all other checks depend on the sections that a stage has
        raise UserError(wrong["stage"])
    config = inherit(config)
    try:
        config = with_template_text(config)
    except UserError as error:
        wrong = wrong | {"data.chat_template": str(error)}
    # Lines about a key with a wrong value are dropped: the value was replaced, so they would be misleading.
    known = {re.split(r"[#\[]", key)[0] for key in wrong} & set(dotted_keys(type(config)))
    named = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in known) or r"(?!)")
    follow_ups = [line for line in problems(config, ranks) if not named.search(line)]
    if wrong or follow_ups:
        raise UserError(*wrong.values(), *follow_ups)
    return config


def problems(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for every conflict between keys and every missing or unusable file or folder."""
    for check, sections in CHECKS.items():
        if type(config).model_fields.keys() >= set(sections):
            yield from check(config, ranks)
