"""What a reward model reads: prompt and answer as ids of its own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, TemplateFault, Tokenizer, render
from ppo_ds.rewards.base import RewardError
from ppo_ds.types import Row, moved

Template = Literal["chat", "pair", "concat"]


@dataclass(frozen=True)
class Text:
    """Ids of one text, special tokens included, and the token types where the tokenizer gives them."""

    ids: list[int]
    types: list[int] | None

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """A row and its answer -> Text.

    chat    the tokenizer's chat template over the row's messages (or its prompt as the user's one message) and the answer.
    pair    two segments, as cross-encoders are trained: the prompt (the contents of the row's messages) and the answer.
    concat  the prompt and the answer as one text. Of a chat: the contents of its messages and the answer, a line break between any two; as the
            actor's template renders the prompt where the vocabularies are the same (``actors_vocabulary``): the markup is then the reward
            model's too.

    Texts are cut to ``max_tokens`` on the left, for the answer is at the end; a pair loses of its prompt alone, unless the answer leaves it no room.
    ``append_eos``: True ends each text with the end token, False none, None those that end so of themselves: a finished answer under concat.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        max_tokens: int | None,
        append_eos: bool | None,
        key: str = "reward",
        actors_vocabulary: bool = True,
    ):
        self.template = template
        self._key, self._actors_vocabulary = key, actors_vocabulary
        self._hf = tokenizer.hf
        self._hf.truncation_side = "left"
        self._max_tokens = max_tokens
        self._append_eos = append_eos
        if template == "chat" and not tokenizer.has_chat_template:
            raise UserError(
                f"{key}.template=chat: the reward model's tokenizer has no chat template; use auto, pair or concat"
            )
        if append_eos and self._hf.eos_token_id is None:
            raise UserError(f"{key}.append_eos=true: the reward model's tokenizer has no end token")

    def __call__(self, row: Row, response: str, finished: bool) -> Text:
        if self.template == "pair":
            return self._pair(_spoken(row), response)
        if self.template == "chat":
            messages = row.get("messages") or [{"role": "user", "content": row["prompt_text"]}]
            text = self._rendered([*messages, {"role": "assistant", "content": response}])
            return self._single(text, special_tokens=False, end=bool(self._append_eos))
        foreign = row.get("messages") and not self._actors_vocabulary
        text = f"{_spoken(row)}\n{response}" if foreign else row["prompt_text"] + response
        # a chat that was rendered with the same beginning already has it
        has_bos = self._hf.bos_token is not None and text.startswith(self._hf.bos_token)
        return self._single(
            text, special_tokens=not has_bos, end=finished if self._append_eos is None else self._append_eos
        )

    def _rendered(self, messages: list[Message]) -> str:
        try:
            return render(self._hf, messages)
        except TemplateFault as error:
            raise RewardError(
                f"{self._key}.template=chat: the reward model's chat template {error}; set {self._key}.template=pair or {self._key}.template=concat"
            ) from error

    def _single(self, text: str, *, special_tokens: bool, end: bool) -> Text:
        encoded = self._hf(
            text, add_special_tokens=special_tokens, **self._cut("longest_first", room_for=int(end))
        )
        ids, types = encoded["input_ids"], encoded.get("token_type_ids")
        eos = self._hf.eos_token_id
        if end and eos is not None and ids[-1:] != [eos]:
            ids, types = [*ids, eos], None if types is None else [*types, types[-1] if types else 0]
        return Text(ids, types)

    def _pair(self, prompt: str, response: str) -> Text:
        answer = len(
            self._hf(response, add_special_tokens=False, verbose=False)["input_ids"]
        ) + self._hf.num_special_tokens_to_add(pair=True)
        fits = self._max_tokens is None or answer < self._max_tokens  # and some of the prompt
        # as lists: of a lone empty answer the tokenizer would make a single text, without the second segment
        encoded = self._hf([prompt], [response], **self._cut("only_first" if fits else "longest_first"))
        types = encoded.get("token_type_ids")
        return Text(encoded["input_ids"][0], None if types is None else types[0])

    def _cut(self, strategy: str, room_for: int = 0) -> dict[str, object]:
        if self._max_tokens is None:
            return {"verbose": False}
        return {"truncation": strategy, "max_length": self._max_tokens - room_for, "verbose": False}


def _spoken(row: Row) -> str:
    """The prompt without any chat markup, which is another model's."""
    messages = row.get("messages")
    return "\n".join(message["content"] for message in messages) if messages else row["prompt_text"]


def right_padded(
    texts: list[Text], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """ids [b,T], attention mask [b,T] from the lengths, token types [b,T] or None."""
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(mask.shape, pad_id)
    ids[mask] = torch.tensor([i for text in texts for i in text.ids])
    types = None
    if all(text.types is not None for text in texts):
        types = torch.zeros_like(ids)
        types[mask] = torch.tensor([t for text in texts for t in text.types or []])
        types = moved(types, device)
    return moved(ids, device), moved(mask, device), types


def left_padded(texts: list[Text], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same with the padding before the texts."""
    backwards = [Text(text.ids[::-1], None if text.types is None else text.types[::-1]) for text in texts]
    ids, mask, types = right_padded(backwards, pad_id, device)
    return ids.flip(1), mask.flip(1), None if types is None else types.flip(1)
