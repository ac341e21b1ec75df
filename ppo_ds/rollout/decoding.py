"""Decodes sequences of different lengths token by token, with any causal LM that has plain attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ppo_ds.rollout.cache import Prefix, SlotCache
from ppo_ds.types import to_device


class Decoder:
    """Causal LM with a cache of ``slots`` sequences of up to ``length`` tokens each, for one rollout."""

    def __init__(self, lm: nn.Module, *, slots: int, length: int):
        self.lm = lm
        self.device = next(lm.parameters()).device
        self.cache = SlotCache(lm.config.get_text_config(decoder=True).num_hidden_layers, slots, length)
        self._columns = torch.arange(length, device=self.device)
        self._extra = {"use_cache": True} | (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(lm.forward).parameters else {}
        )

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Prefix:
        """Returns the keys and values of every layer for right-padded ids [c,P].

        Attention is causal, so the padding on the right does not affect the tokens.
        """
        # created without the config; with it, layers with a sliding window would keep only the window
        cache = DynamicCache()
        positions = torch.arange(ids.shape[1], device=self.device).expand(len(ids), -1)
        ids = to_device(ids, self.device)
        self.lm(input_ids=ids, position_ids=positions, past_key_values=cache, **self._extra)
        return [(layer.keys, layer.values) for layer in cache.layers]

    @torch.no_grad()
    def logits(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Returns the logits [n,V] after ``tokens`` [n], which are at ``positions`` [n] of the first n slots.

        All positions must be below ``columns``, the number of cache columns that are read.
        """
        self.cache.at(positions, columns)
        # transformers adds a 4-dimensional mask to the attention scores unchanged. The mask has the dtype of
        # the scores, since a boolean mask would be converted in every layer.
        hidden = self._columns[:columns] > positions[:, None]
        lowest = torch.finfo(self.lm.dtype).min
        mask = torch.zeros_like(hidden, dtype=self.lm.dtype).masked_fill_(hidden, lowest)
        out = self.lm(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self.cache,
            **self._extra,
        )
        self.cache.drop_rows()
        return out.logits[:, -1]


@contextmanager
def explicit_mask_attention(lm: nn.Module) -> Iterator[None]:
    """Replaces attention that accepts no masks, such as flash attention, by sdpa inside the block."""
    before = lm.config._attn_implementation
    try:
        if before not in ("eager", "sdpa"):
            lm.config._attn_implementation = "sdpa"
        yield
    finally:
        lm.config._attn_implementation = before


def refusal(lm: nn.Module, longest: int | None = None) -> str | None:
    """Returns why ``Decoder`` cannot decode this model, in a few words, or None if it can.

    A sliding window is supported if the longest sequence, of ``longest`` tokens (None: the model's maximum),
    does not exceed it. If the weights are loaded, the logits of a few fixed tokens are compared with those of
    plain forwards.
    """
    config = lm.config.get_text_config(decoder=True)
    if lm.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    accepted = inspect.signature(lm.forward).parameters
    missing = [name for name in ("past_key_values", "position_ids", "attention_mask") if name not in accepted]
    if missing:
        return f"forward() takes no {missing[0]}"
    bound = longest or getattr(config, "max_position_embeddings", None)
    for layer in DynamicCache(config=lm.config).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            if bound is None or layer.sliding_window < bound:
                longer = f"sequences of up to {bound or 'any number'}"
                return f"a sliding window of {layer.sliding_window} tokens is shorter than {longer}"
        elif type(layer) is not DynamicLayer:
            return f"its layers keep other states than keys and values ({type(layer).__name__})"
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in lm.parameters()):
        return None
    try:
        return compare_with_forward(lm, min(bound or 1024, 4096))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # model code may raise anything for a mask that it does not expect
        return f"its forward fails with an explicit cache and mask: {' '.join(str(error).split())[:120]}"


@torch.no_grad()
def compare_with_forward(lm: nn.Module, length: int) -> str | None:
    """Decodes the last two tokens of sequences of 5 and 3 tokens and compares the logits with plain forwards.

    The cache has ``length`` columns, so that a model that counts positions from the last column instead of
    using the mask computes other logits. Returns a description of the difference, or None if there is none.
    """
    vocabulary = lm.get_input_embeddings().num_embeddings
    with explicit_mask_attention(lm):
        decoder = Decoder(lm, slots=2, length=max(length, 8))
        ids = torch.arange(3, 13, device=decoder.device).view(2, 5) * 7 % vocabulary
        prefix, slots = decoder.prefill(ids[:, :3]), torch.arange(2, device=decoder.device)
        if len(prefix) != len(decoder.cache.layers):
            layers = len(decoder.cache.layers)
            return f"{len(prefix)} of {layers} layers use the cache that is passed to forward()"
        decoder.cache.fill(prefix, slots, slots)
        ends = torch.tensor([5, 3], device=decoder.device)
        for back in (2, 1):
            logits = decoder.logits(ids[slots, ends - back], ends - back, columns=decoder.cache.length)
    expected = torch.stack(
        [lm(input_ids=ids[i : i + 1, :end], use_cache=False).logits[0, -1] for i, end in enumerate((5, 3))]
    )
    gap = float((logits - expected).abs().max())
    bound = (1e-3 if lm.dtype == torch.float32 else 5e-2) * max(1.0, float(expected.abs().max()))
    return None if gap <= bound else f"logits of tokens decoded one by one are off by {gap:.3g}"
