"""Linear layers whose fp32 products on a CPU use oneDNN where it is faster (compute/matmul.py).

For a rollout, ``packed_weights`` can copy their weights to the layout in which oneDNN multiplies. Otherwise
oneDNN rearranges the weights in every product, which takes up to half of the time of a product with few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ppo_ds.compute import matmul

# Maximum bytes of packed weights. In full training, the update needs more memory than decoding with a copy of
# this size. The memory estimate of generation includes the copy.
MOST_PACKED = 2**29
# Packing a weight takes about as long as 5 to 10 products with few rows save.
FEWEST_PRODUCTS = 32


class Linear(nn.Linear):
    """Linear layer that computes its products by ``matmul.linear``."""

    packed_weight: Tensor | None = None  # set inside ``packed_weights``

    def forward(self, x: Tensor) -> Tensor:
        """Computes x weight^T + bias: [...,in_features] -> [...,out_features]."""
        if self.packed_weight is not None and x.dtype == self.weight.dtype:
            return matmul.packed_linear(x, self.packed_weight, self.bias)
        return matmul.linear(x, self.weight, self.bias)


def install_linears(model: nn.Module) -> None:
    """Converts every ``nn.Linear`` of a model to a ``Linear`` with the same parameters and hooks.

    Subclasses of ``nn.Linear`` are left unchanged. The state dict does not change.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def pays(size: int, products: int) -> bool:
    """Returns whether to pack weights of ``size`` bytes in total if each is multiplied ``products`` times."""
    return products >= FEWEST_PRODUCTS and size <= MOST_PACKED


@contextmanager
def packed_weights(model: nn.Module, products: int) -> Iterator[None]:
    """Makes each ``Linear`` of ``model`` use a copy of its weight in oneDNN's layout inside the block.

    The weights must not change inside the block, and gradients must be disabled. ``products`` is the number
    of times that each weight is multiplied. Nothing is packed if ``products`` is below ``FEWEST_PRODUCTS``,
    if the weights need more than ``MOST_PACKED`` bytes, or if oneDNN does not compute the products.
    """
    layers = [
        module for module in model.modules() if isinstance(module, Linear) and matmul.packs(module.weight)
    ]
    if not pays(sum(layer.weight.nbytes for layer in layers), products):
        layers = []
    try:
        with torch.no_grad():
            for layer in layers:
                layer.packed_weight = matmul.packed(layer.weight)
        yield
    finally:
        for layer in layers:
            layer.packed_weight = None
