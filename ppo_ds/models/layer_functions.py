"""Replaces functions inside the layers of a model by faster ones: RMSNorm and RoPE.

The functions of ``compute.fused`` replace them and compute the same numbers bit for bit. A class or function
of transformers is replaced only if its results in a small example are equal, so families with other formulas
keep theirs. Only attributes of module instances are set, so that names of weights and modules, hooks,
adapters and copies made from a model's class and config do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import isfunction
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_ds.compute.fused import rms_norm, rotary

_ROTARY = "apply_rotary_pos_emb"  # name of the function that the attention of most families calls
_DTYPES = (torch.float32, torch.bfloat16)


def use_fused_functions(model: nn.Module) -> None:
    """Replaces the RMSNorms and RoPEs of ``model`` by fused ones that compute the same numbers."""
    for module in model.modules():
        kind: Any = type(module)
        forward = norm_forward(kind)
        # Qwen3 has norms before RoPE. The order in which the gradients of the norms' weights are summed
        # depends on the strides of RoPE's gradient, which differ from autograd's strides.
        if forward is None and "q_norm" not in dict(module.named_children()):
            forward = attention_forward(kind)
        if forward is not None:
            module.forward = MethodType(forward, module)


@cache
def norm_forward(kind: Any) -> Callable[..., Tensor] | None:
    """Returns a forward that calls ``rms_norm`` if the class ``kind`` computes an RMSNorm, and else None."""
    formula = _norm_formula(kind)
    if formula is None:
        return None
    shifted, eps = formula

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            return kind.forward(self, hidden_states)
        if shifted:
            weight = 1.0 + self.weight.float()
            return rms_norm(hidden_states, weight, getattr(self, eps)).type_as(hidden_states)
        return rms_norm(hidden_states, self.weight, getattr(self, eps))

    return forward


def _norm_formula(kind: type[nn.Module]) -> tuple[bool, Literal["variance_epsilon", "eps"]] | None:
    """Returns whether an RMSNorm multiplies by 1 + weight (Gemma), and the name of its epsilon.

    Returns None if the class computes another formula.
    """
    if "RMSNorm" not in kind.__name__:
        return None
    names: tuple[Literal["variance_epsilon", "eps"], ...] = ("variance_epsilon", "eps")
    for eps in names:
        fits = [_norm_results(kind, eps, dtype) for dtype in _DTYPES]
        if all(plain for plain, _ in fits):
            return False, eps
        if all(shifted for _, shifted in fits):
            return True, eps
    return None


@torch.no_grad()
def _norm_results(kind: Any, eps: str, dtype: torch.dtype) -> tuple[bool, bool]:
    """Tests on an example whether ``kind`` is RMSNorm times weight, and whether times 1 + weight."""
    example = kind.__new__(kind)
    nn.Module.__init__(example)
    example.weight = nn.Parameter(torch.linspace(-1, 2, 8, dtype=dtype), requires_grad=False)
    setattr(example, eps, 0.01)
    x = torch.linspace(-2, 3, 24).sin().view(3, 8).to(dtype)
    try:
        result = kind.forward(example, x)
    except (AttributeError, TypeError, RuntimeError):  # it needs other attributes or arguments
        return False, False
    shifted = rms_norm(x, 1.0 + example.weight.float(), 0.01).type_as(x)
    return torch.equal(result, rms_norm(x, example.weight, 0.01)), torch.equal(result, shifted)


@cache
def attention_forward(kind: Any) -> Callable[..., Any] | None:
    """Returns the forward of the attention class ``kind`` with ``rotary`` in place of its RoPE.

    Returns None if the class does not call a RoPE function that computes the same as ``rotary``. This
    function is a global of the file that defines the class, so the result is a copy with other globals.
    """
    forward = kind.forward
    if not isfunction(forward) or _ROTARY not in forward.__code__.co_names:
        return None
    own: Any = forward.__globals__.get(_ROTARY)
    if not _is_usual_rotary(own):
        return None

    def whole_or_own(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        # GPT-NeoX and Phi-3 may rotate only some of the coordinates
        chosen = rotary if cos.shape[-1] == q.shape[-1] else own
        return chosen(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    changed = forward.__globals__ | {_ROTARY: whole_or_own}
    copied = FunctionType(
        forward.__code__, changed, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


@cache
@torch.no_grad()
def _is_usual_rotary(function: Any) -> bool:
    """Returns whether ``function`` computes the same as ``rotary`` in a small example."""
    if not callable(function):
        return False
    numbers = torch.linspace(-2, 3, 2 * 5 * 8)
    for dtype in _DTYPES:
        q = numbers.sin().view(1, 2, 5, 8).to(dtype)
        k = numbers.cos()[40:].view(1, 1, 5, 8).to(dtype)
        cos, sin = q[:, 0] * 0.4, q[:, 1] * 0.3
        try:
            results = function(q, k, cos, sin)
        except (TypeError, ValueError, RuntimeError):  # it takes other arguments
            return False
        if not all(torch.equal(a, b) for a, b in zip(results, rotary(q, k, cos, sin), strict=True)):
            return False
    return True
