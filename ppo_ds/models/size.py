"""A model's sizes, as ops/flops.py counts costs by them."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ppo_ds.ops.flops import Size

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # how configs call their number


def size_of(model: nn.Module) -> Size:
    """Of a transformers model, also one whose parameters ZeRO-3 has sharded. A sequence classifier's head is its score row, or nothing.

    A config that does not say how many experts there are and how many a token takes (by the usual names) counts all of them.
    """
    config: Any = model.config.get_text_config()
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    head = output.weight if output is not None else None
    body = sum(_numel(p) for p in model.parameters() if p is not embedding and p is not head)
    heads = getattr(config, "num_attention_heads", None) or 0  # none: a state-space model, which keeps no keys and values
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
    """Taken by decoding ``rows`` answers side by side, ``tokens`` places in all with their prompts, beside the weights.

    The cache; one layer's activations where all of it is read at once (four hidden states, three of the MLP's); and a row of logits each, in the
    model's dtype and three times in fp32, as sampling copies them.
    """
    config: Any = lm.config.get_text_config()
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    size, each = size_of(lm), lm.dtype.itemsize
    cache = 2 * size.layers * size.kv_width * each
    activations = (4 * hidden + 3 * inner) * each
    return tokens * (cache + activations) + rows * config.vocab_size * (each + 3 * 4)
