"""Linear layers whose fp32 products on a CPU are computed by the faster library, see ops/matmul.py."""

from __future__ import annotations

from torch import Tensor, nn

from ppo_ds.ops import matmul


class Linear(nn.Linear):
    """Linear layer that computes its products by ``matmul.linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes x weight^T + bias [...,N] of x [...,K]."""
        return matmul.linear(x, self.weight, self.bias)


def install_linears(model: nn.Module) -> None:
    """Makes every ``nn.Linear`` of a model a ``Linear`` with the same parameters and hooks.

    Subclasses of ``nn.Linear`` are left unchanged. Nothing changes in the state dict.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
