"""Attention within each of the sequences that share one row: what a packed forward needs of a model.

transformers hands what it does not know (here: where each sequence ends) down to the attention function of
every layer, in all models that support attention backends. Ours takes the place of its "sdpa", and passes on
whatever is not packed. Gradient checkpointing repeats a layer with the same arguments, so a repeated forward
is packed too.

On CUDA 16-bit numbers take a kernel of torch's (``torch.nn.attention.varlen``); with
attn_implementation=flash_attention_2 transformers itself reads the same arguments. Neither has been tried on
a GPU yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppo_ds.types import moved

_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.12 or later


@dataclass
class Heard:
    """Records what the attention layers of a packed forward received."""

    kernel: list[bool] = field(
        default_factory=list
    )  # of each that was told where sequences end: whether the kernel takes its heads
    deaf: list[str] = field(default_factory=list)  # those that were not told, by class

    @property
    def fault(self) -> str | None:
        """Why sequences would read each other; None if they do not."""
        if self.deaf:
            return f"{self.deaf[0]} was not told where the sequences of a packed row end"
        return None if self.kernel else "it has run no attention of ours"


_heard: ContextVar[Heard | None] = ContextVar("_heard", default=None)  # of the packed forward that is running
_told: ContextVar[bool] = ContextVar(
    "_told", default=False
)  # whether the running forward's rows are known: one sequence each, or packed by us
_found_out = masking_utils.find_packed_sequence_indices


def packed_arguments(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Returns the arguments of a packed forward, with the names that transformers' flash attention uses."""
    ends = moved(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


@contextmanager
def laid_out(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """Around a forward of a Layout (layout.py). transformers would have the host wait for the position ids,
    to find out whether they are packed.
    """
    token = _told.set(True)
    try:
        with packed_forward(model) if packed else nullcontext():
            yield
    finally:
        _told.reset(token)


@contextmanager
def packed_forward(model: PreTrainedModel) -> Iterator[None]:
    """Around a forward with ``packed_arguments``: no mask is made, and a model whose layers did not get the
    arguments is an error.

    At the end: in the middle of a forward it would leave ZeRO-3 with weights gathered. Within ``listening``
    it is for the listener to judge.
    """
    if not ours(model) or _heard.get() is not None:
        yield
        return
    with listening() as heard:
        yield
    assert heard.fault is None, f"{type(model).__name__} cannot be packed: {heard.fault}"


@contextmanager
def listening() -> Iterator[Heard]:
    """Around a packed forward; what its layers were given is known afterwards."""
    token = _heard.set(heard := Heard())
    try:
        yield heard
    finally:
        _heard.reset(token)


def ours(model: PreTrainedModel) -> bool:
    """Returns whether the layers of ``model`` call ``attention``."""
    return model.config.get_text_config()._attn_implementation == "sdpa"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes attention [b,t,heads,d] of query [b,heads,t,d], key and value [b,groups,t,d], without weights."""
    ends = kwargs.get("cu_seq_lens_q")
    heard = _heard.get()
    if ends is None:
        if heard is not None:
            heard.deaf.append(type(module).__name__)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N,heads,d]
    kernel = has_kernel(q, v)
    if heard is not None:
        heard.kernel.append(kernel)
    if kernel:
        out = varlen_attn(
            q, k, v, ends, ends, kwargs["max_length_q"], kwargs["max_length_k"],
            scale=kwargs.get("scaling"), window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    else:
        out = one_by_one(q, k, v, ends.tolist(), kwargs.get("scaling"))
    return out[None], None


def one_by_one(query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float | None) -> Tensor:
    """Causal attention of each sequence by itself. query [N,heads,d], key and value [N,groups,d]; ``ends``
    begins with 0.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0] for q, k, v in parts], dim=1
    ).transpose(0, 1)


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Returns whether flash attention takes query and value [N,heads,d] as they are."""
    width = query.shape[-1]
    return (
        _GROUPED
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == value.shape[-1] <= 256
        and width % 8 == 0
    )


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _heard.get() is not None else sdpa_mask(*args, **kwargs)


def _found(position_ids: Tensor) -> Tensor | None:
    return None if _told.get() else _found_out(position_ids)


AttentionInterface.register("sdpa", attention)
AttentionMaskInterface.register("sdpa", _mask)
masking_utils.find_packed_sequence_indices = (
    _found  # there is no argument for it: no position ids would be made there, and asked alike
)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Returns why sequences cannot share a row in this model, or None if they can."""
    config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False) or config._attn_implementation not in (
        "sdpa",
        "flash_attention_2",
    ):
        return f"the attention of {type(model).__name__} ({config._attn_implementation}) cannot be replaced"
    kinds = set(_kinds(config)) - {"full_attention"}
    if kinds or getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} has layers other than full attention ({', '.join(sorted(kinds)) or 'with a state'})"
    if any(getattr(config, name, None) for name in ("attn_logit_softcapping", "alibi", "use_alibi")):
        return f"{type(model).__name__} changes the attention's scores (soft caps or distances)"
    return None


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Of the layers' attention; a window without a list of layers is on all of them."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return kinds


def packs(model: PreTrainedModel, layout: str, device: torch.device) -> bool:
    """``memory.layout`` decided for one model, as far as it shows without a trial (packable.py). auto: where
    there may be a kernel, and the model can.

    On CPUs packing was 0.9 to 1.2 times as slow as rows grouped by length (ops/batching.py), forward and
    backward, Llamas of 2 to 4 layers.
    """
    if layout == "padded" or why_not_packed(model) is not None:
        return False
    return layout == "packed" or (device.type == "cuda" and _has_flash(model, device))


def _has_flash(model: PreTrainedModel, device: torch.device) -> bool:
    return (
        _GROUPED
        and model.dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
