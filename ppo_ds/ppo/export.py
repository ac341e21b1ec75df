"""Export of the models of a PPO run."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.training.save_model import save_model


def export_models(
    run_dir: Path,
    actor: HybridActor,
    critic: TrainedModel | None,
    ema: WeightCopy | None,
    tokenizer: Tokenizer,
) -> None:
    """Writes model/, critic/ and model_ema/ in Hugging Face format, and adapter/ in that of peft.

    A collective. adapter/ is only written if the actor has adapters.
    """
    policy = actor.module

    def save_policy(folder: Path, weights: dict[str, Tensor]) -> None:
        policy.save(folder, weights)
        policy.save_adapter(run_dir / "adapter", weights)

    save_model(actor, "lm.", run_dir / "model", save_policy, tokenizer)
    if critic is not None:
        save_model(critic, "model.", run_dir / "critic", critic.module.save, tokenizer)
    if ema is not None:
        with ema.swapped():
            save_model(actor, "lm.", run_dir / "model_ema", policy.save, tokenizer)
