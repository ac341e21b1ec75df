"""NEFTune (Jain et al. 2023): uniform noise on the embeddings of the tokens, in training only.

In a row of L tokens with embeddings of width d, each component gets uniform noise of at most
alpha / sqrt(L * d). Each row has a seed, so its noise is the same on any number of ranks, in any micro-batch,
in padded and packed rows, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ppo_ds.models.layout import Layout


@dataclass(frozen=True)
class EmbeddingNoise:
    """Scale and seeds of the noise that one forward adds to the embeddings of its B rows."""

    alpha: float
    seeds: Tensor  # [B] long, one for each row


@contextmanager
def noisy_embeddings(lm: PreTrainedModel, layout: Layout, noise: EmbeddingNoise | None) -> Iterator[None]:
    """Adds ``noise`` to the embeddings in the forward of ``layout`` that runs in this context."""

    if noise is None:
        yield
        return
    alpha, seeds = noise.alpha, noise.seeds.tolist()

    def add_noise(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        rows, width, device = [], embedded.shape[-1], embedded.device
        for length, seed in zip(layout.lengths, seeds, strict=True):
            generator = torch.Generator(device).manual_seed(seed)
            uniform = torch.rand(length, width, generator=generator, device=device)
            rows.append((2 * uniform - 1) * (alpha / math.sqrt(length * width)))
        added = torch.cat(rows)[None] if layout.packing else pad_sequence(rows, batch_first=True)
        return embedded + added.to(embedded.dtype)

    hook = lm.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()
