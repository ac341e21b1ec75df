"""Relative positions of DeBERTa without a copy from the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.deberta_v2 import modeling_deberta_v2


def log_bucket_positions(relative_pos: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Computes what ``make_log_bucket_position`` of transformers computes.

    transformers makes a constant on the CPU and copies it to the device of ``relative_pos``. On a GPU the
    host would wait for this copy in every forward.
    """
    middle = bucket_size // 2
    near = (relative_pos < middle) & (relative_pos > -middle)
    distance = torch.where(near, middle - 1, relative_pos.abs())
    scale = torch.log(torch.tensor((max_position - 1) / middle))
    far = torch.ceil(torch.log(distance / middle) / scale * (middle - 1)) + middle
    return torch.where(distance <= middle, relative_pos.type_as(far), far * torch.sign(relative_pos))


def avoid_upload() -> None:
    """Makes all DeBERTa models of this process use ``log_bucket_positions``."""
    modeling_deberta_v2.make_log_bucket_position = log_bucket_positions
