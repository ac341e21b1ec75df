"""FLOPs and bytes of a transformer's forwards, counted from its sizes: what a step needs at least, whoever computes it.

A multiplication and an addition are two FLOPs. Norms, softmax and activations are left out (below a percent), and what is computed again
(gradient checkpointing) is not counted, as in PaLM's MFU (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """What of a model's shape its costs depend on."""

    body: int  # parameters beside the input embedding and the head
    head: int  # parameters of the head, also where it is the input embedding's own
    layers: int
    width: int  # of attention's queries: heads x head size
    kv_width: int  # of its keys (and of its values): key heads x head size
    idle: int = 0  # of the body: parameters that a token does not pass, of experts that are not its own


def causal_pairs(lengths: Iterable[int]) -> int:
    """(query, key) pairs that rows of ``lengths`` tokens attend to, each token to itself and to all before it."""
    return sum(n * (n + 1) // 2 for n in lengths)


def forward_flops(size: Size, tokens: int, pairs: int, head_places: int) -> int:
    """Of a forward over ``tokens`` real tokens, with ``pairs`` of causal_pairs and the head at ``head_places`` of them."""
    return (
        2 * (size.body - size.idle) * tokens
        + 4 * size.layers * size.width * pairs
        + 2 * size.head * head_places
    )


def decode_bytes(size: Size, steps: int, contexts: int, bytes_each: int) -> int:
    """Read by ``steps`` decode steps: the weights once each, and the keys and values of ``contexts`` places, summed over the steps' rows.

    ``bytes_each``: of a weight and of a cached number. The rows of the input embedding that are looked up are left out.
    """
    weights = (size.body + size.head) * steps
    return bytes_each * (weights + 2 * size.layers * size.kv_width * contexts)
