"""Export of trained models in Hugging Face format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.storage.drafts import draft_directory


def export_actor(run_dir: Path, actor: TrainedModel, ema: WeightCopy | None, tokenizer: Tokenizer) -> None:
    """Writes model/, model_ema/ if ``ema`` is given, and adapter/ if the policy has one. A collective."""
    policy = actor.module

    def save_policy(folder: Path, weights: dict[str, Tensor]) -> None:
        policy.save_adapter(run_dir / "adapter", weights)
        policy.save(folder, weights)

    export_model(actor, "lm.", run_dir / "model", save_policy, tokenizer)
    if ema is not None:
        with ema.swapped():
            export_model(actor, "lm.", run_dir / "model_ema", policy.save, tokenizer)


def export_model(
    model: TrainedModel,
    prefix: str,
    folder: Path,
    save: Callable[[Path, dict[str, Tensor]], None],
    tokenizer: Tokenizer,
) -> None:
    """Writes the weights of ``model`` and the tokenizer to ``folder``, which is replaced. A collective.

    ``save`` runs on rank 0 and receives the weights below ``prefix``, without it. Nothing else holds them.
    """
    weights = consolidated(model)
    if weights is not None:
        names = [name for name in weights if name.startswith(prefix)]
        kept = {name.removeprefix(prefix): weights.pop(name) for name in names}
        with draft_directory(folder) as draft:
            save(draft, kept)
            tokenizer.save(draft)
