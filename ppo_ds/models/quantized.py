"""Frozen weights in 4 bits: NF4 with double quantization (QLoRA, Dettmers et al. 2023), from bitsandbytes.

transformers quantizes the linear layers of the trunk as it loads them, on the CPU, so that all ranks and
exports have the same codes. Embeddings, norms, heads, and layers whose input size is no multiple of 64 keep
the model's dtype. All layers compute in this dtype. Names and shapes in state dicts are those without
quantization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

# weights per scale; on some CPUs bitsandbytes misreads blocks that continue in the next row
BLOCK = 64
# what transformers leaves on a model that it has quantized
_MARKS = ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit")


def nf4_arguments(skeleton: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the ``from_pretrained`` arguments for NF4; ``skeleton`` is the model on the meta device."""
    modules = skeleton.base_model.modules()
    in_blocks = {id(module) for module in modules if getattr(module, "in_features", 0) % BLOCK == 0}
    plain = [name for name, module in skeleton.named_modules() if name and id(module) not in in_blocks]
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=plain,
    )
    return {"quantization_config": settings, "device_map": {"": "cpu"}}


def hide_quantization(model: Any) -> None:
    """Removes quantization from a model's config, and makes its state dicts contain dequantized weights."""
    for name in _MARKS:
        delattr(model, name)
    del model.config.quantization_config
    for module in model.modules():
        if is_quantized(getattr(module, "weight", None)):
            # On CPUs with bf16, forwards outside of training would repack the codes in place.
            module.support_avx512bf16_for_cpu = False
            module.register_state_dict_post_hook(_dequantize_state)


def is_quantized(weight: Any) -> bool:
    return getattr(weight, "quant_state", None) is not None


def plain_weight(weight: Tensor) -> Tensor:
    """Dequantizes an NF4 weight to a new tensor in the model's dtype; returns any other weight unchanged."""
    if not is_quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight, weight.quant_state)


def whole_shape(weight: Tensor) -> Sequence[int]:
    """Returns the full shape of a weight, even if it is sharded by ZeRO-3 or quantized."""
    return weight.quant_state.shape if is_quantized(weight) else getattr(weight, "ds_shape", weight.shape)


def whole_numel(parameter: Tensor) -> int:
    """Returns the number of elements of the whole parameter, even if it is sharded or quantized."""
    return math.prod(whole_shape(parameter))


def _dequantize_state(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Dequantizes ``module``'s weight in ``state`` (not with ``keep_vars``); deletes quantization entries."""
    weight: Any = module.weight
    for name in weight.quant_state.as_dict(packed=True):
        del state[f"{prefix}weight.{name}"]
    if state[f"{prefix}weight"] is not weight:
        state[f"{prefix}weight"] = plain_weight(weight)
