"""A model's sizes, as ops/flops.py counts costs by them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ppo_ds.ops.flops import Size


def size_of(model: nn.Module) -> Size:
    """Of a transformers model, also one whose parameters ZeRO-3 has sharded. A sequence classifier's head is its score row, or nothing."""
    config: Any = model.config.get_text_config()
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = output.weight if output is not None else None
    body = sum(_numel(p) for p in model.parameters() if p is not embedding and p is not head)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Size(
        body=body,
        head=_numel(head) if head is not None else 0,
        layers=config.num_hidden_layers,
        width=config.num_attention_heads * head_dim,
        kv_width=kv_heads * head_dim,
    )


def _numel(parameter: nn.Parameter) -> int:
    """Of the whole parameter: a sharded one has none of its own between two forwards."""
    return getattr(parameter, "ds_numel", parameter.numel())
