"""Attention of packed rows, in which several sequences share one row and each attends only to itself.

In all models that support attention backends, transformers passes unknown arguments of the forward (here the
ends of the sequences) to the attention function of every layer. This module replaces the function registered
as "sdpa"; forwards that are not packed still call the original. Gradient checkpointing repeats a layer with
unchanged arguments, so the repeated forward is packed too.

On CUDA, 16-bit inputs use a kernel of torch (``torch.nn.attention.varlen``). With
attn_implementation=flash_attention_2, transformers itself reads these arguments. Neither kernel was tested on
a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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

from ppo_ds.distributed.sequence_group import SequenceGroup
from ppo_ds.types import to_device

_HAS_AMX = torch.cpu._is_amx_tile_supported()  # its 16-bit products are several times as fast as fp32
# whether the kernel supports fewer heads of key and value than of the query (since torch 2.12)
_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass
class AttentionCalls:
    """Record of the calls of ``attention`` in one packed forward."""

    # for each layer that received the ends of the sequences: whether the kernel supports its heads
    kernel: list[bool] = field(default_factory=list)
    without_ends: list[str] = field(default_factory=list)  # classes of the layers that did not receive them

    @property
    def fault(self) -> str | None:
        """The reason why sequences in a row can attend to each other, or None if they cannot."""
        if self.without_ends:
            return f"{self.without_ends[0]} does not receive the ends of the sequences in a packed row"
        return None if self.kernel else "it never calls the attention function of ppo_ds"


# the record of the packed forward that is running, or None
_calls: ContextVar[AttentionCalls | None] = ContextVar("_calls", default=None)
# True during a forward of a Layout, which defines the sequences of each row
_layout_known: ContextVar[bool] = ContextVar("_layout_known", default=False)
_find_packed_sequence_indices = masking_utils.find_packed_sequence_indices


def packed_arguments(
    lengths: list[int], device: torch.device, sequence: SequenceGroup | None = None
) -> dict[str, Any]:
    """Returns the arguments of a packed forward, with the names that transformers' flash attention uses.

    ``lengths`` are the numbers of tokens of the sequences. Attention without a kernel reads the ends from
    ``sequence_ends``, a list, so that no layer waits for the GPU. The ranks of ``sequence`` divide the tokens
    of the row; a padding sequence makes the number of tokens divisible.
    """
    if sequence is not None and (filling := -sum(lengths) % sequence.size):
        lengths = [*lengths, filling]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    on_device = to_device(ends, device)
    return {
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "sequence_ends": ends.tolist(),
        "sequence_group": sequence,
    }


@contextmanager
def layout_forward(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """Prepares transformers for a forward of a Layout (layout.py) that runs inside the block.

    There, transformers does not search the position ids for packed rows, since the host would wait for
    the result. If attn_implementation is sdpa, a packed forward makes no attention mask, and all layers must
    receive ``packed_arguments``. This is asserted after the forward, because under ZeRO-3 an exception during
    the forward would leave weights gathered. In a ``record_attention_calls`` block, the caller must check it.
    """
    records = packed and uses_attention_interface(model) and _calls.get() is None
    token = _layout_known.set(True)
    try:
        with record_attention_calls() if records else nullcontext() as calls:
            yield
    finally:
        _layout_known.reset(token)
    assert calls is None or calls.fault is None, f"{type(model).__name__} cannot be packed: {calls.fault}"


@contextmanager
def record_attention_calls() -> Iterator[AttentionCalls]:
    """Records the attention calls of the packed forward that runs inside the block."""
    token = _calls.set(calls := AttentionCalls())
    try:
        yield calls
    finally:
        _calls.reset(token)


def undivided_heads(config: PreTrainedConfig, parts: int) -> str | None:
    """Returns why ``parts`` ranks cannot divide the heads of a model, or None if they can."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)  # some model families use other names
    groups = getattr(text, "num_key_value_heads", None) or heads
    if heads % parts or groups % parts:
        return f"its {heads} attention heads and {groups} key-value heads are not divisible by it"
    return None


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Returns whether the layers of ``model`` call ``attention``."""
    return model.config.get_text_config()._attn_implementation == "sdpa"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes attention [b,t,heads,d] of query [b,heads,t,d], key and value [b,groups,t,d].

    The second item, the attention weights, is always None.
    """
    ends = kwargs.get("cu_seq_lens_q")
    calls = _calls.get()
    if ends is None:
        if calls is not None:
            calls.without_ends.append(type(module).__name__)
        return whole_rows(module, query, key, value, attention_mask, **kwargs), None
    if calls is not None:
        calls.kernel.append(has_kernel(query, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    compute = partial(attention_of_packed_row, arguments=kwargs)
    group = kwargs.get("sequence_group")
    return compute(q, k, v) if group is None else group.attention(compute, q, k, v), None


def attention_of_packed_row(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Computes attention [1,N,heads,d] of query [1,N,heads,d], key and value [1,N,groups,d].

    ``arguments`` are the keyword arguments of ``attention``.
    """
    q, k, v = query[0], key[0], value[0]
    if not has_kernel(q, v):
        return attention_per_sequence(q, k, v, arguments["sequence_ends"], arguments.get("scaling"))[None]
    grouped = {"enable_gqa": True} if _GROUPED else {}
    if not _GROUPED:
        k, v = for_each_head(q, k, v)
    ends = arguments["cu_seq_lens_q"]
    return varlen_attn(
        q, k, v, ends, ends, arguments["max_length_q"], arguments["max_length_k"],
        scale=arguments.get("scaling"), window_size=(-1, 0), **grouped,
    )[None]  # fmt: skip


def whole_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Computes attention of rows that are not packed; ``attention`` documents the shapes.

    On a CPU without AMX, the backward of torch's bf16 kernel takes longer than a forward plus a backward in
    fp32, so the backward uses fp32 there.
    """

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = attention_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]

    slow = query.device.type == "cpu" and query.dtype == key.dtype == value.dtype == torch.bfloat16
    if slow and not _HAS_AMX and query.requires_grad and not kwargs.get("dropout"):
        return _Fp32Backward.apply(compute, query, key, value)
    return compute(query, key, value)


class _Fp32Backward(torch.autograd.Function):
    """Computes attention in the dtype of its inputs; the backward repeats the forward in fp32.

    Only the inputs are saved for the backward, so this takes no more memory than the 16-bit kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.compute = compute
        return compute(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [each.detach().float().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.compute(*inputs)
        found = torch.autograd.grad(out, inputs, grad.to(out.dtype))
        return None, *(each.to(grad.dtype) for each in found)


def attention_per_sequence(
    query: Tensor, key: Tensor, value: Tensor, ends: list[int], scale: float | None
) -> Tensor:
    """Computes causal attention [N,heads,d] within each sequence.

    query is [N,heads,d], key and value are [N,groups,d]. ``ends`` holds 0 and the end of each sequence.
    """
    key, value = for_each_head(query, key, value)
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0] for q, k, v in parts], dim=1
    ).transpose(0, 1)


def for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats key and value [N,groups,d] to [N,heads,d], for the heads of the query [N,heads,d]."""
    heads = query.shape[1] // key.shape[1]
    if heads == 1:
        return key, value
    return key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Returns whether flash attention supports query and value [...,d]."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == value.shape[-1] <= 256
        and width % 8 == 0
    )


def mask_unless_packed(*args: Any, **kwargs: Any) -> Tensor | None:
    """Returns the mask of transformers' sdpa attention, or None in a packed forward."""
    return None if _calls.get() is not None else sdpa_mask(*args, **kwargs)


def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
    """Returns the sequence index of each token as transformers detects it; None in a forward of a Layout."""
    return None if _layout_known.get() else _find_packed_sequence_indices(position_ids)


AttentionInterface.register("sdpa", attention)
AttentionMaskInterface.register("sdpa", mask_unless_packed)
# transformers has no argument that turns the detection off: a model without position ids computes them and
# runs the detection on them.
masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Returns why sequences cannot share a row in this model, or None if they can."""
    config = model.config.get_text_config()
    implementation, name = config._attn_implementation, type(model).__name__
    replaceable = implementation in ("sdpa", "flash_attention_2")
    if not getattr(model, "_supports_attention_backend", False) or not replaceable:
        return f"the attention of {name} ({implementation}) cannot be replaced"
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None):  # every layer has the window
        kinds = ["sliding_attention"]
    others = sorted(set(kinds or []) - {"full_attention"})
    if others or getattr(model, "_is_stateful", False):
        return f"{name} has layers other than full attention ({', '.join(others) or 'with a state'})"
    if any(getattr(config, key, None) for key in ("attn_logit_softcapping", "alibi", "use_alibi")):
        return f"{name} changes the attention scores (soft caps or distances)"
    return None


def why_padded(model: PreTrainedModel, layout: str, device: torch.device) -> str | None:
    """Returns why memory.layout=``layout`` excludes packed rows in this model, or None if it allows them.

    ``auto`` allows packed rows on a GPU that has the kernel. On a CPU they gain nothing: forward and backward
    of Llamas with 2 to 4 layers took 0.9 to 1.2 times as long as with rows grouped by length
    (compute/batching.py). If the result is None, ``PackableModel.choose_layout`` still tests the model.
    """
    if layout == "padded":
        return "memory.layout=padded"
    reason = why_not_packed(model)
    if layout == "packed" or reason is not None:
        return reason
    if device.type != "cuda":
        return "packed rows gain nothing on a CPU"
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel for packed rows does not take {str(model.dtype).removeprefix('torch.')}"
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return None if ampere else "the kernel for packed rows needs an A100 or a later GPU"


_FIRST, _SECOND = 8, 24  # numbers of tokens in the two rows that ``_try_packed`` compares


@dataclass(frozen=True)
class LayoutChoice:
    """Result of ``choose_layout``, shown in the start-up banner."""

    packed: bool
    reason: str | None = None  # why rows are padded
    kernel: bool = False  # whether a kernel computes the packed attention of every layer
    # whether to warn of the reason: the config requests packed rows, or the model has failed the test
    unexpected: bool = False


class PackableModel(nn.Module):
    """Model with a transformers trunk that takes padded or packed rows.

    If ``packed`` is true, a forward concatenates its rows into one. ``choose_layout`` sets it, since not
    every model supports packed rows.
    """

    _positions: bool  # the forward takes position ids

    def __init__(self) -> None:
        super().__init__()
        self.packed = False

    @property
    def trunk(self) -> PreTrainedModel:
        """The transformers model that computes the hidden states."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding; all token ids must be smaller."""
        return self.trunk.get_input_embeddings().num_embeddings

    def choose_layout(
        self, layout: str, device: torch.device, forward: Callable[[Tensor, Tensor, int], Any]
    ) -> LayoutChoice:
        """Chooses and sets the layout of this model for ``memory.layout`` (auto, packed or padded).

        Packed rows are first tested with two forwards, since no flag of a model class shows whether its
        layers respect the ends of the sequences. ``forward(ids, attention_mask, response_width)`` calls this
        model through its engine. Under ZeRO-3 all ranks must call this.
        """
        self.packed = False
        if reason := why_padded(self.trunk, layout, device):
            return LayoutChoice(False, reason, unexpected=layout == "packed")
        fault, kernel = self._try_packed(forward)
        self.packed = fault is None and (kernel or layout == "packed")
        reason = None if self.packed else fault or "no kernel supports its heads"
        return LayoutChoice(self.packed, reason, kernel, unexpected=fault is not None)

    def why_not_divided(self, parts: int) -> str | None:
        """Returns why ``parts`` ranks cannot divide the tokens of a forward, or None if they can."""
        if not self.packed:
            return "its rows cannot be packed"
        if not uses_attention_interface(self.trunk):
            return "its attn_implementation must be sdpa"
        if problem := undivided_heads(self.trunk.config, parts):
            return problem
        return None if self._positions else "its forward must take position_ids"

    def _try_packed(self, forward: Callable[[Tensor, Tensor, int], Any]) -> tuple[str | None, bool]:
        """Compares the hidden states of two short rows between a padded and a packed forward.

        Returns two items: why rows cannot be packed (None if they can), and whether a kernel supports the
        heads of every layer. Only the second row is compared, since only its tokens follow another sequence
        when packed. Their median difference decides, since rounding may route a token to another expert.
        """
        ids = torch.arange(2 * _SECOND).view(2, _SECOND) % self.vocab_size
        mask = torch.ones(2, _SECOND, dtype=torch.bool)
        mask[0, _FIRST:] = False
        # Hidden states of the second row, padded and then packed. The first forward of a policy may run its
        # trunk twice, to probe the head.
        states: list[Tensor] = []
        hook = self.trunk.base_model.register_forward_hook(
            lambda _module, _inputs, out: states.append(out.last_hidden_state[-1, -_SECOND:].float())
        )
        try:
            with torch.no_grad():
                forward(ids, mask, 1)
                self.packed = True
                with record_attention_calls() as calls:
                    forward(ids, mask, 1)
        finally:
            hook.remove()
            self.packed = False
        if uses_attention_interface(self.trunk) and calls.fault is not None:
            return calls.fault, False
        if not states:  # OPT calls the decoder inside its base model
            return f"{type(self.trunk).__name__} does not call its base model", False
        padded, packed = states[-2:]
        gap = float(((packed - padded).norm(dim=1) / padded.norm(dim=1)).median())
        equal = gap < (1e-3 if self.trunk.dtype == torch.float32 else 0.1)
        fault = None if equal else f"{type(self.trunk).__name__} computes other states in packed rows"
        return fault, all(calls.kernel)
