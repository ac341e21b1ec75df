"""Reward models with a scoring method ``get_score(tokenizer, chat)``, such as InternLM2's.

A model that also has ``get_scores(tokenizer, chats)`` can score a batch. The model's code applies the chat
template, adds special tokens and padding, and chooses the position of the score.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.loading import config_of, from_pretrained, refuse_missing
from ppo_ds.models.tokenizer import Message, Tokenizer, load_tokenizer

Chat = list[Message]  # ends with the response

_MARKUP = 8  # approximate number of tokens that a template adds to one message


class ChatScorer(nn.Module):
    """Wraps a model that has a method ``get_score``, and the model's tokenizer."""

    def __init__(self, model: Any, tokenizer: Tokenizer):
        super().__init__()
        self.model = model
        self._tokenizer = tokenizer
        self.scores_batches = callable(getattr(model, "get_scores", None))

    def forward(self, chats: list[Chat], batched: bool) -> Tensor:
        """Returns the scores [B] of ``chats`` in fp32 on the CPU; calls get_scores if ``batched``.

        The number of scores is not checked: the model's code may return fewer or more.
        """
        if batched:
            scores = self.model.get_scores(self._tokenizer.hf, chats)
        else:
            scores = [self.model.get_score(self._tokenizer.hf, chat) for chat in chats]
        return torch.tensor(_numbers(scores), dtype=torch.float32)

    def length(self, chat: Chat) -> int:
        """Estimates the number of tokens of a chat; only the model's code knows the exact chat template."""
        texts = self._tokenizer.encode_many([message["content"] for message in chat], special_tokens=False)
        return sum(len(text) + _MARKUP for text in texts)


def expect_trusted(path: str, trust_remote_code: bool, key: str) -> None:
    """Raises UserError unless ``trust_remote_code`` is true; ``key`` is the model's section in the config."""
    if not trust_remote_code:
        raise UserError(
            f"{key}.trust_remote_code=false: get_score is Python code from the files of {path}; "
            f"read that code, then set {key}.trust_remote_code=true"
        )


def load_chat_scorer(section: ModelConfig, *, key: str = "reward.model") -> ChatScorer:
    """Loads a model with its tokenizer and freezes it. Errors name ``key``, the section in the config."""
    path = section.path
    expect_trusted(path, section.trust_remote_code, key)
    tokenizer = load_tokenizer(path, section.revision, section.trust_remote_code, key=f"{key}.path")
    config = config_of(section, f"{key}.path")
    # scoring needs no cache, and the model's code may use a cache class that transformers 5 has removed
    config.use_cache = False
    try:
        model, info = from_pretrained(AutoModel, section, config=config, key=f"{key}.path")
    except UserError:
        raise
    except Exception as error:  # code for another version of transformers may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{key}.path={path}: its own code fails with transformers {transformers.__version__}: {reason}"
        ) from error
    if not callable(getattr(model, "get_score", None)):
        raise UserError(
            f"{key}.path={path}: a {type(model).__name__} has no get_score(tokenizer, chat); "
            "for a sequence classifier use reward=model"
        )
    refuse_missing(path, info, key=f"{key}.path")
    return ChatScorer(model.requires_grad_(False).eval(), tokenizer)


def _numbers(scores: Any) -> list[float]:
    """Flattens numbers, tensors of any shape and nested lists of them; raises TypeError for other types."""
    if isinstance(scores, (list, tuple)):
        return [number for part in scores for number in _numbers(part)]
    try:
        return torch.as_tensor(scores).double().flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"it returned {scores!r:.80}, which is no score") from None
