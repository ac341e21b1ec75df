"""Checks models and rewards before weights are loaded, using config files, tokenizers and the data.

Loading a large model takes minutes. Each loader repeats the checks of its model; here they only report errors
earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ppo_ds.assemble.data import Inputs, read_inputs
from ppo_ds.assemble.roles import CLASSIFIER, ppo_needs
from ppo_ds.config.checks.data import is_prepared
from ppo_ds.config.schema import TEACHER, PPOConfig, all_rewards, has_critic, reward_models, uses_reference
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.targets import bind
from ppo_ds.config.text import show
from ppo_ds.config.types import parts_of
from ppo_ds.distributed.world import World
from ppo_ds.environments.base import load_environment
from ppo_ds.errors import UserError
from ppo_ds.models.chat_scorer import expect_trusted
from ppo_ds.models.loading import config_of
from ppo_ds.models.packed_attention import undivided_heads
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import reward_errors_as_user_errors
from ppo_ds.rewards.model import check_reward_model
from ppo_ds.rewards.teacher import check_teacher
from ppo_ds.rewards.user_function import load_function
from ppo_ds.rollout.keys import VLLM
from ppo_ds.rollout.vllm_support import model_problem, package_problem, parallel_problem
from ppo_ds.types import Row

CHAT_SCORER = "ppo_ds.rewards.get_score.get_score_reward"
# rewards that load a model
MODEL_REWARDS = (CLASSIFIER, CHAT_SCORER, TEACHER)
FUNCTION = "ppo_ds.rewards.function.FunctionReward"
# rewards of ppo_ds are cheap to build for a check; other rewards may load a model
OWN = "ppo_ds.rewards."


class ScoredInputs(Protocol):
    """A tokenizer and the prompts whose responses are scored."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    def examples(self) -> list[tuple[str, Row]]: ...
    def check_rows(self, check: Callable[[Row], object]) -> None: ...


def check_inputs(config: PPOConfig, world: World, *, prepared: bool) -> None:
    """Raises UserError for mistakes in data and rewards.

    Callers check the inputs before they refuse to resume, or move files of an earlier run. ``prepared`` is
    False if `prepare` has not yet created its files. Then only reward functions and the environment are
    checked, except those whose code `prepare` creates. All ranks must call this.
    """
    for key, section in reward_parts(all_rewards(config), FUNCTION):
        file = section["path"].rpartition(":")[0]
        if prepared or not is_prepared(file, config):
            load_function(section["path"], f"{key}.path")
    settings = config.rollout.environment
    if settings.path and (prepared or not is_prepared(settings.path.rpartition(":")[0], config)):
        load_environment(settings.path, settings.arguments)
    if prepared:
        preflight(config, read_inputs(config, world), world.device.type == "cuda")


def reward_parts(
    rewards: Mapping[str, dict[str, Any]], *targets: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields key and section of the rewards, at any depth, that are built by one of ``targets``."""
    for reward, whole in rewards.items():
        for key, section in parts_of(whole, reward):
            if section.get("_target_") in targets:
                yield key, section


def preflight(config: PPOConfig, inputs: Inputs, on_gpu: bool) -> None:
    """Raises UserError if a model or a reward cannot use the data, or vLLM cannot run the actor.

    This is not a collective. All ranks find the same errors, since they read the same files.
    """
    check_models(config, inputs)
    check_engine_package(config)
    check_engine_model(config, on_gpu)
    check_rewards(all_rewards(config), inputs)


def check_rewards(rewards: Mapping[str, dict[str, Any]], inputs: ScoredInputs) -> None:
    """Raises UserError if a reward cannot use the data. ``rewards`` maps config keys to reward sections."""
    for reward, whole in rewards.items():
        for key, section in _rewards(whole, reward):
            check_reward(section, key, inputs)


def try_functions(rewards: Mapping[str, dict[str, Any]], inputs: ScoredInputs) -> None:
    """Calls each reward function once; raises UserError if a function raises or returns invalid scores.

    ``rewards`` maps config keys to reward sections. A function gets trial responses to the prompts of
    ``inputs.examples()``. Other rewards are not called, because a service may charge for a request, and
    models are not loaded yet.
    """
    rows = [row for _, row in inputs.examples()]
    for key, section in reward_parts(rewards, FUNCTION):
        bind(section, key)(tokenizer=inputs.tokenizer).try_on(rows)


def check_models(config: PPOConfig, inputs: Inputs) -> None:
    """Raises UserError if actor, reference, critic or a teacher cannot read the data.

    Also raises UserError if memory.sequence_parallel cannot divide a model or the load-balancing loss.
    """
    models: dict[str, Any] = {"actor.model.path": config.actor.model}
    if uses_reference(config):
        models["reference.model.path"] = config.reference.model
    if has_critic(config) and config.critic.init == "path":
        models["critic.model.path"] = config.critic.model
    divided = set(models)
    for key, section in reward_parts(all_rewards(config), TEACHER):
        models[f"{key}.model.path"] = ModelConfig(**section["model"])
    positions, parts = inputs.longest_row(config.sampling.max_new_tokens), config.memory.sequence_parallel
    needs = ppo_needs(inputs.tokenizer.id_bound, positions)
    for key, model in models.items():
        check_vocabulary(key, model, inputs.tokenizer, "actor")
        found = config_of(model, key)
        limit = getattr(found.get_text_config(), "max_position_embeddings", None)
        needs.check_positions(found, limit, str(model.path), key)
        if key in divided and (problem := undivided_heads(found, parts)):
            raise UserError(f"memory.sequence_parallel={parts}: {problem} ({key}={model.path})")
    text, given = config_of(config.actor.model, "actor.model.path").get_text_config(), config.algo.aux_coef
    if parts > 1 and (getattr(text, "router_aux_loss_coef", None) if given is None else given):
        raise UserError(
            f"algo.aux_coef={show(given)}: the load-balancing loss needs whole rows; set algo.aux_coef=0 or "
            "memory.sequence_parallel=1"
        )


def check_engine_package(config: PPOConfig) -> None:
    """Raises UserError if the run needs vLLM, but it is not installed or its version was not tested."""
    if isinstance(config.rollout, VLLM) and (problem := package_problem()):
        raise UserError(f"rollout.backend={config.rollout.backend}: {problem}; or use rollout.backend=auto")


def check_engine_model(config: PPOConfig, on_gpu: bool) -> None:
    """Raises UserError if vLLM cannot decode the actor, divide it among ranks, or sleep on this device."""
    rollout, key = config.rollout, "actor.model.path"
    if not isinstance(rollout, VLLM):
        return
    if rollout.vllm.sleep_level(on_gpu) and not on_gpu:
        raise UserError(f"rollout.vllm.sleep={rollout.vllm.sleep}: vLLM cannot sleep on a CPU; use auto or 0")
    found, where = config_of(config.actor.model, key), f"{key}={config.actor.model.path}"
    if problem := model_problem(found, on_gpu):
        raise UserError(f"rollout.backend={rollout.backend}: {problem}; use rollout.backend=auto ({where})")
    text, group = found.get_text_config(), rollout.vllm.tensor_parallel
    heads = getattr(text, "num_attention_heads", 0)
    keys = getattr(text, "num_key_value_heads", None) or heads
    # some model families use other names; vLLM then checks the sizes itself
    if heads and (problem := parallel_problem(heads, keys, getattr(text, "intermediate_size", 0), group)):
        raise UserError(f"rollout.vllm.tensor_parallel={group}: {problem} ({where})")


def check_vocabulary(key: str, model: Any, tokenizer: Tokenizer, tokenizer_of: str) -> None:
    """Raises UserError if a model lacks an embedding row for an id of a tokenizer.

    ``tokenizer_of`` is the name of the model that provides the tokenizer.
    """
    # some model families use another name for vocab_size
    rows = getattr(config_of(model, key).get_text_config(), "vocab_size", None)
    if rows is not None and tokenizer.id_bound > rows:
        raise UserError(
            f"{key}={model.path}: the {tokenizer_of}'s tokenizer has ids up to {tokenizer.id_bound - 1}, but "
            f"this model's embedding has only {rows} rows; use a model and a tokenizer that belong together"
        )


def _rewards(section: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key and the section of each reward that can be checked separately.

    A mixture without models is one reward; of a mixture with models, each part is one. Rewards of other
    packages are left out.
    """
    target = str(section.get("_target_", ""))
    if target in MODEL_REWARDS or (target.startswith(OWN) and not any(reward_models(section))):
        yield key, section
        return
    for name, inner in section.items():
        if isinstance(inner, dict):
            yield from _rewards(inner, f"{key}.{name}")


def check_reward(section: dict[str, Any], key: str, inputs: ScoredInputs) -> None:
    """Raises UserError if a reward cannot use the data.

    A reward model must be able to read them, the code of a chat scorer must be trusted, and any other reward
    must accept all rows.
    """
    if section["_target_"] == CLASSIFIER:
        options = {name: section[name] for name in ("template", "append_eos", "normalize") if name in section}
        check_reward_model(ModelConfig(**section["model"]), inputs.examples(), key=key, **options)
    elif section["_target_"] == CHAT_SCORER:
        model = ModelConfig(**section["model"])
        expect_trusted(model.path, model.trust_remote_code, f"{key}.model")
    elif section["_target_"] == TEACHER:
        check_teacher(ModelConfig(**section["model"]), inputs.tokenizer, key)
    else:
        reward = bind(section, key)(tokenizer=inputs.tokenizer, reduce=lambda tensor: tensor)

        def check_row(row: Row) -> None:
            with reward_errors_as_user_errors():
                reward.check_row(row)

        inputs.check_rows(check_row)
