"""A model's sizes, as ops/flops.py counts costs by them and ops/memory.py memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from ppo_ds.errors import UserError
from ppo_ds.models.loading import load_config
from ppo_ds.models.lora import add_adapters
from ppo_ds.ops.flops import Size
from ppo_ds.ops.memory import Shape, decode_bytes_bound

_LOGIT_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)  # what stands between a head and its logits
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # how configs call their number


def size_of(model: nn.Module) -> Size:
    """Of a transformers model, also one whose parameters ZeRO-3 has sharded. A sequence classifier's head is
    its score row, or nothing.

    A config that does not say how many experts there are and how many a token takes (by the usual names)
    counts all of them.
    """
    config: Any = model.config.get_text_config()
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = output.weight if output is not None else None
    body = sum(_numel(p) for p in model.parameters() if p is not embedding and p is not head)
    heads = (
        getattr(config, "num_attention_heads", None) or 0
    )  # none: a state-space model, which keeps no keys and values
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Size(
        body=body,
        head=_numel(head) if head is not None else 0,
        layers=config.num_hidden_layers,
        width=heads * head_dim,
        kv_width=kv_heads * head_dim,
        idle=_idle(model, config),
    )


def _idle(model: nn.Module, config: Any) -> int:
    """Parameters of the experts that a token does not take; shared experts are everybody's."""
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), None)
    taken = getattr(config, "num_experts_per_tok", None)
    if not experts or not taken:
        return 0
    routed = sum(_numel(p) for name, p in model.named_parameters() if ".experts." in name)
    return routed * (experts - taken) // experts


def _numel(parameter: nn.Parameter) -> int:
    """Of the whole parameter: a sharded one has none of its own between two forwards."""
    return getattr(parameter, "ds_numel", parameter.numel())


def decoding_bytes(lm: PreTrainedModel, tokens: int, rows: int) -> int:
    """Taken by decoding ``rows`` answers side by side, ``tokens`` places in all with their prompts, beside
    the weights.
    """
    return decode_bytes_bound(shape_of(lm), tokens, rows, lm.dtype.itemsize)


def shape_of(model: PreTrainedModel) -> Shape:
    """Of a transformers model, on the meta device too: what ops/memory.py works out its memory from."""
    config: Any = model.config.get_text_config()
    size, parameters, names = (
        size_of(model),
        list(model.parameters()),
        [name for name, _ in model.named_parameters()],
    )
    trained = [p for p in parameters if p.requires_grad]
    inner = (
        getattr(config, "intermediate_size", None)
        or getattr(config, "ffn_dim", None)
        or 4 * config.hidden_size
    )
    if taken := getattr(config, "num_experts_per_tok", None):
        inner = taken * (getattr(config, "moe_intermediate_size", None) or inner) + (
            getattr(config, "shared_expert_intermediate_size", None) or 0
        )
    output = model.get_output_embeddings()
    return Shape(
        parameters=sum(_numel(p) for p in parameters),
        trained=sum(_numel(p) for p in trained),
        largest_trained=max((_numel(p) for p in trained), default=0),
        largest_tensor=max(_numel(p) for p in parameters),
        head=size.head,
        tied=output is not None and output.weight is model.get_input_embeddings().weight,
        vocabulary=config.vocab_size,
        layers=size.layers,
        hidden=config.hidden_size,
        inner=inner,
        gated=any("gate" in name for name in names),
        heads=getattr(config, "num_attention_heads", None) or 0,
        width=size.width,
        kv_width=size.kv_width,
        fused=config._attn_implementation != "eager",
        head_norms=any("q_norm" in name for name in names),
        makes_logits=any(getattr(config, name, None) not in (None, 1.0) for name in _LOGIT_CHANGES),
        idle=size.idle,
    )


def planned_shape(
    path: str,
    *,
    classifier: bool,
    trained: bool,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
    lora: tuple[int, list[str] | None] | None = None,
    value_head: bool = False,
    key: str,
) -> Shape:
    """The same from a folder's config.json alone: the model is made on the meta device, where nothing has
    memory.

    ``classifier``: with one label, as critics and reward models are; else a language model. ``lora``: rank
    and targets. UserError names ``key``.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    attention = None if attn_implementation == "sdpa" else attn_implementation  # see loading.from_pretrained
    if classifier:
        config.num_labels = 1
    auto_class = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto_class.from_config(
                config, trust_remote_code=trust_remote_code, attn_implementation=attention
            )
            if lora is not None:
                add_adapters(model, rank=lora[0], alpha=1.0, targets=lora[1], seed=0, key=key)
    except (ValueError, ImportError) as error:
        raise UserError(f"{key}={path}: {' '.join(str(error).split())[:300]}") from error
    if not trained:
        model.requires_grad_(False)
    shape = shape_of(model)
    extra = shape.hidden if value_head else 0
    return replace(shape, parameters=shape.parameters + extra, trained=shape.trained + extra)
