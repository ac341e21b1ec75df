"""Finds the Hub models of a config, which are downloaded before they are loaded (models/download.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppo_ds.assemble.preflight import CHAT_SCORER
from ppo_ds.assemble.roles import CLASSIFIER
from ppo_ds.config.schema import Config, all_rewards, has_critic, trained_models, uses_reference
from ppo_ds.models.download import HubModel


def models_to_download(config: Config) -> list[HubModel]:
    """Returns the models that a run loads, except for those of rewards of other packages."""
    sections = type(config).model_fields
    roles = {name: section.model for name, section in trained_models(config).items()}
    if "critic" in roles and not (has_critic(config) and config.critic.init == "path"):
        del roles["critic"]  # it starts from another role's model, or there is none
    if "reference" in sections and uses_reference(config):
        roles["reference"] = config.reference.model
    models = [
        HubModel(f"{name}.model.path", str(model.path), model.revision, bool(model.trust_remote_code))
        for name, model in roles.items()
    ]
    if "reward" in sections:
        for reward, section in all_rewards(config).items():
            for key, model in _scoring_models(section, reward):
                trusted = bool(model.get("trust_remote_code"))
                models.append(HubModel(f"{key}.path", str(model["path"]), model.get("revision"), trusted))
    return models


def _scoring_models(section: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the key and the section of each model in a reward, at any depth of a mixture."""
    if section.get("_target_") in (CLASSIFIER, CHAT_SCORER):
        yield f"{key}.model", section["model"]
        return
    for name, inner in section.items():
        if isinstance(inner, dict):
            yield from _scoring_models(inner, f"{key}.{name}")
