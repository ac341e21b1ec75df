"""Lists the Hub models of a config, so that they can be downloaded before loading (models/download.py)."""

from __future__ import annotations

from ppo_ds.assemble.preflight import MODEL_REWARDS, reward_parts
from ppo_ds.config.schema import Config, PPOConfig, all_rewards, has_critic, trained_models, uses_reference
from ppo_ds.config.sections.models import InheritedModelConfig, ModelConfig
from ppo_ds.models.download import HubModel


def models_to_download(config: Config) -> list[HubModel]:
    """Returns the models that a run loads, without those of rewards from other packages."""
    roles: dict[str, ModelConfig | InheritedModelConfig] = {
        name: section.model for name, section in trained_models(config).items()
    }
    if isinstance(config, PPOConfig):
        if not (has_critic(config) and config.critic.init == "path"):
            del roles["critic"]  # its weights are those of another role, or there is no critic
        if uses_reference(config):
            roles["reference"] = config.reference.model
    models = [
        HubModel(f"{name}.model.path", str(model.path), model.revision, bool(model.trust_remote_code))
        for name, model in roles.items()
    ]
    if isinstance(config, PPOConfig):
        for key, section in reward_parts(all_rewards(config), *MODEL_REWARDS):
            model = section["model"]
            trusted = bool(model.get("trust_remote_code"))
            path, revision = str(model["path"]), model.get("revision")
            models.append(HubModel(f"{key}.model.path", path, revision, trusted))
    return models
