"""One token at a time from any causal LM of transformers with plain attention, for sequences of different lengths side by side."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ppo_ds.rollout.cache import Prefix, SlotCache


class Decoder:
    """A causal LM and its cache of ``slots`` sequences with up to ``length`` tokens each. Made for one rollout and dropped after it."""

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
        """Right-padded ids [c,P] -> keys and values of every layer. With causal attention no token sees the padding after it."""
        cache = (
            DynamicCache()
        )  # made without the config: windows that are longer than any sequence are not cut
        positions = torch.arange(ids.shape[1], device=self.device).expand(len(ids), -1)
        self.lm(input_ids=ids.to(self.device), position_ids=positions, past_key_values=cache, **self._extra)
        return [(layer.keys, layer.values) for layer in cache.layers]

    @torch.no_grad()
    def logits(self, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """tokens [n] at positions [n] of the first n slots -> logits [n,V] for the next ones. ``columns`` is above every position."""
        self.cache.at(positions, columns)
        # added to the attention scores as it is: with four dimensions transformers makes none of its own. In the dtype of the scores,
        # since a boolean one would be turned into that in every layer
        hidden = self._columns[:columns] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.lm.dtype, device=self.device).masked_fill_(
            hidden, torch.finfo(self.lm.dtype).min
        )
        out = self.lm(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self.cache,
            **self._extra,
        )
        return out.logits[:, -1]


@contextmanager
def own_masks(lm: nn.Module) -> Iterator[None]:
    """Inside, attention takes the masks it is given: flash attention, which knows none, is exchanged for sdpa."""
    before = lm.config._attn_implementation
    try:
        if before not in ("eager", "sdpa"):
            lm.config._attn_implementation = "sdpa"
        yield
    finally:
        lm.config._attn_implementation = before


def can_decode(lm: nn.Module, longest: int | None = None) -> str | None:
    """Why ``Decoder`` cannot decode this model, in a few words; None where it can.

    ``longest``: of the sequences to come, in tokens. A sliding window that is no shorter changes nothing. Where the weights are there,
    a few tokens are decoded and compared with a plain forward: two forwards, on all ranks alike.
    """
    config = lm.config.get_text_config(decoder=True)
    if lm.config.is_encoder_decoder:
        return "an encoder-decoder"
    accepted = inspect.signature(lm.forward).parameters
    missing = [name for name in ("past_key_values", "position_ids", "attention_mask") if name not in accepted]
    if missing:
        return f"forward() takes no {missing[0]}"
    bound = longest or getattr(config, "max_position_embeddings", None)
    for layer in DynamicCache(config=lm.config).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            if bound is None or layer.sliding_window < bound:
                return f"a sliding window of {layer.sliding_window} tokens, sequences of up to {bound or 'any number'}"
        elif type(layer) is not DynamicLayer:
            return f"layers with another state than keys and values ({type(layer).__name__})"
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in lm.parameters()):
        return None
    try:
        return _tried(lm, min(bound or 1024, 4096))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code makes of a mask that it does not expect
        return f"its forward fails with keys, values and a mask of our making: {' '.join(str(error).split())[:120]}"


@torch.no_grad()
def _tried(lm: nn.Module, length: int) -> str | None:
    """Sequences of 5 and 3 tokens, the last two of each one by one, against forwards of the whole.

    In a cache of ``length`` columns: a model that counts from the last column instead of going by the mask (a window of its own) is found.
    """
    vocabulary = lm.get_input_embeddings().num_embeddings
    with own_masks(lm):
        decoder = Decoder(lm, slots=2, length=max(length, 8))
        ids = torch.arange(3, 13, device=decoder.device).view(2, 5) * 7 % vocabulary
        prefix, slots = decoder.prefill(ids[:, :3]), torch.arange(2, device=decoder.device)
        if len(prefix) != len(decoder.cache.layers):
            return f"{len(prefix)} of {len(decoder.cache.layers)} layers use the cache that is passed to forward()"
        decoder.cache.fill(prefix, slots, slots)
        ends = torch.tensor([5, 3], device=decoder.device)
        for back in (2, 1):
            logits = decoder.logits(ids[slots, ends - back], ends - back, columns=decoder.cache.length)
    wanted = torch.stack(
        [lm(input_ids=ids[i : i + 1, :end], use_cache=False).logits[0, -1] for i, end in enumerate((5, 3))]
    )
    gap, bound = (
        float((logits - wanted).abs().max()),
        (1e-3 if lm.dtype == torch.float32 else 5e-2) * max(1.0, float(wanted.abs().max())),
    )
    return None if gap <= bound else f"logits of tokens taken one by one are off by {gap:.3g}"
