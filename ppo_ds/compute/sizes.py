"""Sizes of a transformer, and from these the minimum FLOPs and bytes of its forward passes.

A multiplication and an addition are two FLOPs. Norms, softmax and activation functions (below 1 %) and
recomputation are not counted, as in PaLM's MFU (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# NF4 with double quantization: 4 bits for a weight, 8 for a block of 64 weights, 32 for 256 blocks
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


@dataclass(frozen=True)
class Size:
    """Sizes of a model that determine its compute and its memory traffic."""

    body: int  # parameters other than the input embedding and the head
    head: int  # parameters of the LM head, even if tied to the input embedding; 0 for a classifier
    layers: int
    width: int  # width of the queries: heads x head size
    kv_width: int  # width of the keys, and of the values: key heads x head size
    idle: int = 0  # parameters of the body that a token does not use (unselected experts)


@dataclass(frozen=True, kw_only=True)
class Shape(Size):
    """Sizes of a model that determine its memory. A tied parameter counts once."""

    parameters: int
    trained: int  # trained parameters: all, or adapters and a score head
    largest_trained: int  # elements of the largest trained tensor
    largest_tensor: int  # elements of the largest tensor
    vocabulary: int
    hidden: int
    inner: int  # width of the MLP; for a mixture of experts, the sum over the experts that a token uses
    gated: bool  # the MLP has a gate projection
    heads: int
    fused: bool = True  # the attention kernel materialises no matrix of tokens x tokens
    head_norms: bool = False  # queries and keys are normalised
    makes_logits: bool = False  # an operation follows the LM head, so the logits must be materialised
    linear: int = 0  # weights of linear layers, the LM head included
    quantized: int = 0  # weights in NF4

    def weight_bytes(self, each: int) -> int:
        """Returns the bytes of all weights; an unquantized weight has ``each`` bytes."""
        return each * (self.parameters - self.quantized) + math.ceil(NF4_BITS / 8 * self.quantized)


def causal_pairs(lengths: Iterable[int]) -> int:
    """Counts the (query, key) pairs of causal attention over rows of ``lengths`` tokens."""
    return sum(n * (n + 1) // 2 for n in lengths)


def forward_flops(size: Size, tokens: int, pairs: int, head_positions: int) -> int:
    """Computes the FLOPs of a forward over ``tokens`` tokens, with the head at ``head_positions`` of them.

    ``pairs`` is the number of (query, key) pairs, see ``causal_pairs``.
    """
    return (
        2 * (size.body - size.idle) * tokens
        + 4 * size.layers * size.width * pairs
        + 2 * size.head * head_positions
    )


def decode_bytes(size: Size, steps: int, contexts: int, bytes_each: int) -> int:
    """Returns the bytes that ``steps`` decode steps read: the weights once per step, and the KV cache.

    ``contexts`` is the number of cached positions read, summed over steps and rows.
    """
    weights = (size.body + size.head) * steps
    return bytes_each * (weights + 2 * size.layers * size.kv_width * contexts)
