"""Export of trained models in Hugging Face format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.tokenizer import Tokenizer


def export_model(
    model: TrainedModel,
    prefix: str,
    folder: Path,
    save: Callable[[Path, dict[str, Tensor]], None],
    tokenizer: Tokenizer,
) -> None:
    """Writes the weights of ``model`` and the tokenizer into ``folder``. A collective.

    ``save`` runs on rank 0 only. It receives the weights whose names start with ``prefix``, with the prefix
    removed.
    """
    weights = consolidated(model)
    if weights is not None:
        save(
            folder,
            {
                name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            },
        )
        tokenizer.save(folder)
