"""What every kind of reward shares. The protocol itself, ``Reward: Rollout -> Scores``, is in types.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.types import Rollout, Scores


class RewardError(RuntimeError):
    """A reward gave something that is no score, while training."""


def decoded_responses(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The B answers as text, without special tokens: the tokens under the response mask, whatever their ids are."""
    ids = rollout.ids[:, rollout.prompt_width :]
    return [tokenizer.decode(row[mask].tolist()) for row, mask in zip(ids, rollout.response_mask.bool(), strict=True)]


def sequence_scores(total: Tensor, rollout: Rollout) -> Scores:
    """One score for each answer as a whole; ``total`` [B]."""
    device = rollout.ids.device
    return Scores(total.float().to(device), torch.zeros(rollout.response_mask.shape, device=device), {})


def shown(text: str) -> str:
    """A text as error messages quote it: short, on one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
