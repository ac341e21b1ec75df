"""Determines the sizes of a model, which compute/sizes.py uses for FLOPs and planning/ for memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ppo_ds.compute.sizes import Shape, Size
from ppo_ds.config.sections.models import LoraConfig, ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.download import cached_folder
from ppo_ds.models.loading import attention, code_arguments, config_of, user_errors
from ppo_ds.models.lora import add_adapters, plain_modules
from ppo_ds.models.quantized import BLOCK, is_quantized, whole_numel

# settings that change the logits after the head
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the number of experts


def stored_parameters(path: str, revision: str | None) -> int | None:
    """Counts the parameters in the safetensors files of a model's ``cached_folder``.

    Reads only the beginning of each file. Returns None without such files.
    """
    folder = cached_folder(path, revision)
    files = sorted(folder.glob("model*.safetensors")) if folder is not None else []
    count = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
    return count or None


def size_of(model: nn.Module) -> Size:
    """Returns the sizes of a transformers model, whose parameters may be sharded by ZeRO-3.

    ``head`` is 0 for a sequence classifier. All experts count as active unless the config has both the number
    of experts and the number per token under one of the usual names.
    """
    config: Any = model.config.get_text_config()
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = output.weight if output is not None else None
    body = sum(whole_numel(p) for p in model.parameters() if p is not embedding and p is not head)
    # a state-space model has no attention heads and keeps no keys and values
    heads = getattr(config, "num_attention_heads", None) or 0
    head_dim = head_size(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    experts, active = expert_counts(config)
    idle = 0  # parameters of the experts that a token does not use; all tokens use the shared experts
    if experts:
        routed = sum(whole_numel(p) for name, p in model.named_parameters() if ".experts." in name)
        idle = routed * (experts - active) // experts
    return Size(
        body=body,
        head=whole_numel(head) if head is not None else 0,
        layers=config.num_hidden_layers,
        width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        idle=idle,
    )


def head_size(config: Any) -> int:
    """Returns the size of an attention head from the config of a language model."""
    heads = getattr(config, "num_attention_heads", None) or 0
    return getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)


def expert_counts(config: Any) -> tuple[int, int]:
    """Returns the number of routed experts and the number used per token; zeros unless both are known."""
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    return (experts, active) if experts and active else (0, 0)


def shape_of(model: PreTrainedModel) -> Shape:
    """Returns the shape of a transformers model, which may be on the meta device."""
    config: Any = model.config.get_text_config()
    size, parameters = size_of(model), list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    trained = [p for p in parameters if p.requires_grad]
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)
    inner = inner or 4 * config.hidden_size
    if active := getattr(config, "num_experts_per_tok", None):
        shared = getattr(config, "shared_expert_intermediate_size", None) or 0
        inner = active * (getattr(config, "moe_intermediate_size", None) or inner) + shared
    return Shape(
        **vars(size),
        parameters=sum(whole_numel(p) for p in parameters),
        trained=sum(whole_numel(p) for p in trained),
        largest_trained=max((whole_numel(p) for p in trained), default=0),
        largest_tensor=max(whole_numel(p) for p in parameters),
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        inner=inner,
        gated=any("gate" in name for name in names),
        heads=getattr(config, "num_attention_heads", None) or 0,
        fused=config._attn_implementation != "eager",
        head_norms=any("q_norm" in name for name in names),
        makes_logits=any(getattr(config, name, None) not in (None, 1.0) for name in _LOGIT_CHANGES),
        quantized=sum(whole_numel(p) for p in parameters if is_quantized(p)),
        linear=sum(whole_numel(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)),
    )


def planned_shape(
    section: ModelConfig,
    *,
    classifier: bool,
    trained: bool,
    lora: LoraConfig | None = None,
    value_head: bool = False,
    key: str,
) -> Shape:
    """Returns the shape of a model from its config.json; the model is only built on the meta device.

    ``classifier`` selects a sequence classifier with one label, such as a critic or a reward model, instead
    of a language model. Errors name ``key``.
    """
    config, implementation = config_of(section, key), attention(section, key)
    if classifier:
        config.num_labels = 1
    auto_class = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    if lora is not None and lora.rank:
        import peft  # noqa: F401  which creates tensors that must not be on the meta device
    try:
        with torch.device("meta"):
            model = auto_class.from_config(
                config,
                trust_remote_code=section.trust_remote_code,
                attn_implementation=implementation,
                **code_arguments(section, config),
            )
            if lora is not None and lora.rank:
                add_adapters(model, rank=lora.rank, alpha=1.0, targets=lora.targets, seed=0, key=key)
    except (ValueError, ImportError) as error:
        raise UserError(f"{key}={section.path}: {' '.join(str(error).split())[:300]}") from error
    if not trained:
        model.requires_grad_(False)
    shape = shape_of(model)
    if section.quantization == "nf4":
        linear = [module for module in plain_modules(model.base_model) if isinstance(module, nn.Linear)]
        sizes = [layer.weight.numel() for layer in linear if layer.in_features % BLOCK == 0]
        shape = replace(shape, quantized=sum(sizes))
    return with_value_head(shape) if value_head else shape


def with_value_head(shape: Shape) -> Shape:
    """Returns the shape of a trained model with a value head added."""
    return replace(
        shape,
        body=shape.body + shape.hidden,
        parameters=shape.parameters + shape.hidden,
        trained=shape.trained + shape.hidden,
    )


def planned_own_code_shape(section: ModelConfig, *, key: str) -> Shape:
    """Returns the shape of a reward model that has its own code; reads config.json and runs no code.

    Raises UserError with ``key`` if config.json has no sizes, since the estimate of the memory would be too
    low without this model.
    """
    with user_errors(section.path, key, Exception):
        config, _ = PreTrainedConfig.get_config_dict(section.path, revision=section.revision)
    shape = own_code_shape(config)
    if shape is None:
        raise UserError(
            f"{key}={section.path}: its config.json has no sizes such as hidden_size, from which the doctor "
            "estimates its memory"
        )
    return shape


def own_code_shape(config: Mapping[str, Any]) -> Shape | None:
    """Returns the shape of a frozen reward model that has its own code; ``config`` is its config.json.

    The model is taken for a Llama decoder with a score head. Returns None if a size, such as hidden_size, is
    missing.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = [size for name in names if isinstance(size := config.get(name), int) and size > 0]
    if len(sizes) < len(names):
        return None
    vocabulary, hidden, inner, layers, heads = sizes
    width = heads * (config.get("head_dim") or hidden // heads)
    kv_width = width // heads * (config.get("num_key_value_heads") or heads)
    layer = hidden * (2 * width + 2 * kv_width + 3 * inner + 2)
    body = layers * layer + 2 * hidden
    return Shape(
        body=body,
        parameters=vocabulary * hidden + body,
        trained=0,
        largest_trained=0,
        largest_tensor=vocabulary * hidden,
        head=0,
        vocabulary=vocabulary,
        layers=layers,
        hidden=hidden,
        inner=inner,
        gated=True,
        heads=heads,
        width=width,
        kv_width=kv_width,
    )
