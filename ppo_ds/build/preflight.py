"""What can be found wrong with models and rewards before any weight is loaded: from config files, tokenizers and the rows that were read.

A run with a large model takes minutes to load it. Whoever loads a model checks it again: this only brings the line forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppo_ds.build.data import Inputs
from ppo_ds.build.roles import CLASSIFIER
from ppo_ds.config.schema import Config, ModelConfig, reward_models, uses_reference
from ppo_ds.config.targets import bind
from ppo_ds.errors import UserError
from ppo_ds.models.chat_scorer import expect_trusted
from ppo_ds.models.loading import load_config
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import reward_errors_as_user_errors
from ppo_ds.rewards.model import check_reward_model
from ppo_ds.types import Row

CHAT_SCORER = "ppo_ds.rewards.get_score.get_score_reward"
OURS = "ppo_ds.rewards."  # what is made twice costs nothing; another's may load a model of its own


def preflight(config: Config, inputs: Inputs) -> None:
    """Raises UserError. Reads the same files on every rank, and is no collective."""
    _expect_vocabulary(config, inputs.tokenizer)
    for key, section in _rewards(config.reward, "reward"):
        _expect_reward(section, key, inputs)


def _expect_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    """That the models which read the actor's ids have a row of their embedding for each."""
    models: dict[str, Any] = {"actor.model.path": config.actor.model}
    if uses_reference(config):
        models["reference.model.path"] = config.reference.model
    for key, model in models.items():
        found = load_config(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code, key=key
        )
        rows = getattr(found.get_text_config(), "vocab_size", None)  # a family may call it otherwise
        if rows is not None and tokenizer.id_bound > rows:
            raise UserError(
                f"{key}={model.path}: the actor's tokenizer has ids up to {tokenizer.id_bound - 1}, this model's embedding only {rows} rows; "
                "they do not belong together"
            )


def _rewards(section: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those rewards that can be looked at by themselves: a mixture as a whole, unless a part of it is a model."""
    target = str(section.get("_target_", ""))
    if target in (CLASSIFIER, CHAT_SCORER) or (target.startswith(OURS) and not any(reward_models(section))):
        yield key, section
        return
    for name, inner in section.items():
        if isinstance(inner, dict):
            yield from _rewards(inner, f"{key}.{name}")


def _expect_reward(section: dict[str, Any], key: str, inputs: Inputs) -> None:
    if section["_target_"] == CLASSIFIER:
        options = {name: section[name] for name in ("template", "append_eos") if name in section}
        check_reward_model(ModelConfig(**section["model"]), inputs.examples(), key=key, **options)
    elif section["_target_"] == CHAT_SCORER:
        model = ModelConfig(**section["model"])
        expect_trusted(model.path, model.trust_remote_code, f"{key}.model")
    else:
        reward = bind(section, key)(tokenizer=inputs.tokenizer, reduce=lambda tensor: tensor)

        def check_row(row: Row) -> None:
            with reward_errors_as_user_errors():
                reward.check_row(row)

        inputs.check_rows(check_row)
