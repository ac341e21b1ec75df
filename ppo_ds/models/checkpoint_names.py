"""Names and layout of weights in a checkpoint, which may differ from those of a transformers model in memory.

transformers keeps the experts of a mixture in one tensor, for example, while checkpoints, and the inference
engines that read them, have one tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ppo_ds.models.lora import plain_weights


def checkpoint_tensors(lm: PreTrainedModel, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights of ``lm`` with the names and the layout that ``lm.save_pretrained`` writes.

    ``tensors`` must contain all weights of a decoder layer or none of them.
    """
    yield from revert_weight_conversion(lm, tensors).items()


def checkpoint_names(lm: PreTrainedModel) -> set[str]:
    """Returns the names that ``checkpoint_tensors`` yields for all weights of ``lm`` without adapters."""
    shapes = {
        weight.name: getattr(weight.base, "ds_shape", weight.base.shape) for weight in plain_weights(lm)
    }
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name for name, _ in checkpoint_tensors(lm, tensors)}


def tied_names(lm: PreTrainedModel) -> dict[str, list[str]]:
    """Returns the further names of each weight that ``lm`` uses in several places, such as a tied head."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            others.setdefault(first[id(parameter)], []).append(name)
    return others
