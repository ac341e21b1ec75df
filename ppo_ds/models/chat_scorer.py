"""A reward model that scores chats with Python code of its own: ``get_score(tokenizer, chat)``, as
InternLM2's reward models have it.

Where the code has ``get_scores(tokenizer, chats)`` too, it can score a batch. Templates, special tokens,
padding and the place that is read are that code's own affair.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel

from ppo_ds.errors import UserError
from ppo_ds.models.loading import from_pretrained, load_config, refuse_missing, torch_dtype
from ppo_ds.models.tokenizer import Message, Tokenizer, load_tokenizer

Chat = list[Message]  # ends with the assistant's answer

_MARKUP = 8  # tokens that a template puts around one message, about


class ChatScorer(nn.Module):
    def __init__(self, model: Any, tokenizer: Tokenizer):
        """``tokenizer`` is the model's own."""
        super().__init__()
        self.model = model
        self._tokenizer = tokenizer
        self.scores_batches = callable(getattr(model, "get_scores", None))

    def forward(self, chats: list[Chat], batched: bool) -> Tensor:
        """[B] fp32, on the CPU; as many as the model's code gives. ``batched``: by get_scores."""
        if batched:
            scores = self.model.get_scores(self._tokenizer.hf, chats)
        else:
            scores = [self.model.get_score(self._tokenizer.hf, chat) for chat in chats]
        return torch.tensor(_numbers(scores), dtype=torch.float32)

    def length(self, chat: Chat) -> int:
        """Tokens, about: the template is the business of the model's code."""
        texts = self._tokenizer.encode_many([message["content"] for message in chat], special_tokens=False)
        return sum(len(text) + _MARKUP for text in texts)


def expect_trusted(path: str, trust_remote_code: bool, key: str) -> None:
    if not trust_remote_code:
        raise UserError(
            f"{key}.trust_remote_code=false: get_score is Python code from the files of {path}; read that code, then set {key}.trust_remote_code=true"
        )


def load_chat_scorer(
    path: str,
    *,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    attn_implementation: str,
    key: str = "reward.model",
) -> ChatScorer:
    """Frozen, with its own tokenizer. ``key``: the config's section that errors name."""
    expect_trusted(path, trust_remote_code, key)
    tokenizer = load_tokenizer(path, revision, trust_remote_code, key=f"{key}.path")
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, key=f"{key}.path")
    try:
        model, info = from_pretrained(
            AutoModel,
            path,
            config=config,
            dtype=torch_dtype(dtype),
            revision=revision,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            key=f"{key}.path",
        )
    except UserError:
        raise
    except Exception as error:  # code written for another transformers raises anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{key}.path={path}: its own code fails with transformers {transformers.__version__}: {reason}"
        ) from error
    if not callable(getattr(model, "get_score", None)):
        raise UserError(
            f"{key}.path={path}: a {type(model).__name__} has no get_score(tokenizer, chat); for a sequence classifier use reward=model"
        )
    refuse_missing(path, info, key=f"{key}.path")
    return ChatScorer(model.requires_grad_(False).eval(), tokenizer)


def _numbers(scores: Any) -> list[float]:
    """Numbers, tensors of any shape, and lists of these, as such code returns them."""
    if isinstance(scores, (list, tuple)):
        return [number for part in scores for number in _numbers(part)]
    try:
        return torch.as_tensor(scores).double().flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"it returned {scores!r:.80}, which is no score") from None
