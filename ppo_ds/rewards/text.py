"""Encodes a prompt and a response as token ids for a reward model with a separate tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import TemplateFault, Tokenizer, join_texts, render
from ppo_ds.ops.sequences import pad_rows
from ppo_ds.rewards.base import RewardError, conversation
from ppo_ds.types import Row

Template = Literal["chat", "pair", "concat", "text"]


@dataclass(frozen=True)
class EncodedText:
    """Token ids of one text, special tokens included, with token types if the tokenizer produces them."""

    ids: list[int]
    types: list[int] | None

    def __len__(self) -> int:
        return len(self.ids)

    def with_end(self, eos_id: int) -> EncodedText:
        """Appends the end token unless the text ends with it; its token type is that of the last token."""
        if self.ids[-1:] == [eos_id]:
            return self
        types = None if self.types is None else [*self.types, *(self.types[-1:] or [0])]
        return EncodedText([*self.ids, eos_id], types)


@dataclass
class TextEncoder:
    """Encodes a row and its response for a reward model.

    ``template`` selects the format:

    - chat: the reward tokenizer's chat template, applied to the row's messages and the response.
    - pair: the prompt and the response as two segments, the input format of cross-encoders.
    - concat: prompt and response as one text. With the actor's vocabulary (``actors_vocabulary``) the prompt
      keeps its chat markup; otherwise messages and response are joined by line breaks.
    - text: the format in which stage=reward_model trains on texts: prompt and response, joined by ``joint``
      (None: Tokenizer.joint) unless white space separates them, with the tokenizer's special tokens.

    Texts are truncated to ``max_tokens`` on the left, because the response is at the end; in a pair, the
    prompt is truncated first. ``append_eos`` applies to all formats except pair: True appends the end token
    to each text, False to no text, None to finished responses of concat.
    """

    tokenizer: Tokenizer  # the reward model's
    template: Template
    max_tokens: int | None
    append_eos: bool | None
    key: str = "reward"
    actors_vocabulary: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    joint: str | None = None

    def __post_init__(self) -> None:
        self._hf = self.tokenizer.hf
        self._hf.truncation_side = "left"
        self.eos_id: int | None = self._hf.eos_token_id
        if self.template == "chat" and not self.tokenizer.has_chat_template:
            raise UserError(
                f"{self.key}.template=chat: the reward model's tokenizer has no chat template; use auto, "
                "pair or concat"
            )
        if self.append_eos and self.eos_id is None:
            raise UserError(f"{self.key}.append_eos=true: the reward model's tokenizer has no end token")

    def __call__(self, row: Row, response: str, finished: bool) -> EncodedText:
        if self.template == "pair":
            response_ids = self._hf(response, add_special_tokens=False, verbose=False)["input_ids"]
            needed = len(response_ids) + self._hf.num_special_tokens_to_add(pair=True)
            leaves_room = self.max_tokens is None or needed < self.max_tokens
            truncation = self._truncation("only_first" if leaves_room else "longest_first")
            # passed as lists, because the tokenizer treats an empty response outside a list as missing
            # and encodes a single segment
            encoded = self._hf([prompt_content(row)], [response], **truncation)
            types = encoded.get("token_type_ids")
            return EncodedText(encoded["input_ids"][0], None if types is None else types[0])
        if self.template == "chat":
            chat = [*conversation(row), {"role": "assistant", "content": response}]
            try:
                text = render(self._hf, chat, **self.chat_template_kwargs)
            except TemplateFault as error:
                raise RewardError(
                    f"{self.key}.template=chat: the reward model's chat template {error}; "
                    f"set {self.key}.template=pair or {self.key}.template=concat"
                ) from error
            return self._encode_single(text, special_tokens=False, end=bool(self.append_eos))
        if self.template == "text":
            joint = self.tokenizer.joint if self.joint is None else self.joint
            text = join_texts(prompt_content(row), response, joint)
            return self._encode_single(text, special_tokens=True, end=bool(self.append_eos))
        foreign_markup = row.get("messages") and not self.actors_vocabulary
        text = f"{prompt_content(row)}\n{response}" if foreign_markup else row["prompt_text"] + response
        # a chat template may already include a BOS token; do not add a second BOS
        has_bos = self._hf.bos_token is not None and text.startswith(self._hf.bos_token)
        return self._encode_single(
            text, special_tokens=not has_bos, end=finished if self.append_eos is None else self.append_eos
        )

    def _encode_single(self, text: str, *, special_tokens: bool, end: bool) -> EncodedText:
        truncation = self._truncation("longest_first", reserved=int(end))
        found = self._hf(text, add_special_tokens=special_tokens, **truncation)
        encoded = EncodedText(found["input_ids"], found.get("token_type_ids"))
        return encoded.with_end(self.eos_id) if end and self.eos_id is not None else encoded

    def _truncation(self, strategy: str, reserved: int = 0) -> dict[str, Any]:
        if self.max_tokens is None:
            return {"verbose": False}
        return {"truncation": strategy, "max_length": self.max_tokens - reserved, "verbose": False}


def prompt_content(row: Row) -> str:
    """Returns the prompt without the chat markup of the actor's tokenizer."""
    messages = row.get("messages")
    return "\n".join(message["content"] for message in messages) if messages else row["prompt_text"]


def collate(
    texts: Sequence[EncodedText], pad_id: int, padding_side: str = "right"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Collates texts into padded ids, attention mask and token types, each [b,T].

    Token types are None if a text lacks them. A pad id inside a text remains attended.
    """
    ids, mask = pad_rows([text.ids for text in texts], pad_id, padding_side)
    types = [text.types for text in texts if text.types is not None]
    return ids, mask, pad_rows(types, 0, padding_side)[0] if len(types) == len(texts) else None
