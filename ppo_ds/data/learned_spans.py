"""Finds the characters of a rendered chat that a language-modelling loss learns.

A chat template may mark the assistant's text with ``{% generation %}``. Otherwise a turn is found by
rendering prefixes of the chat: it begins where the prompt before it ends, and it ends where the chat up to it
ends. That is exact if the template renders these prefixes as it renders the beginning of the whole chat.
Some templates do not, for example those that drop the reasoning of earlier turns; such chats are refused.
"""

from __future__ import annotations

from typing import Literal

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer

Learn = Literal["answer", "assistant", "all"]  # see sft.learn
Span = tuple[int, int]  # first character, and the one after the last


def learned_spans(tokenizer: Tokenizer, chat: list[Message], learn: Learn) -> tuple[str, list[Span]]:
    """Renders a chat that ends with the assistant; returns its text and the learned spans in order.

    Raises UserError without the location of the row, which the caller adds.
    """
    if learn == "all":
        text = tokenizer.render_chat(chat, to_answer=False)
        return text, [(0, len(text))]
    if tokenizer.marks_answers:
        text, spans = tokenizer.render_answers(chat)
        if not spans:
            raise UserError(
                "the chat template marks nothing of this chat with {% generation %}; correct the template "
                "(data.chat_template) or the row"
            )
    else:
        text = tokenizer.render_chat(chat, to_answer=False)
        turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
        spans = [_turn(tokenizer, chat, i, text) for i in (turns[-1:] if learn == "answer" else turns)]
    return text, spans[-1:] if learn == "answer" else spans


def _turn(tokenizer: Tokenizer, chat: list[Message], i: int, text: str) -> Span:
    """Returns the span of message ``i`` in ``text``, the whole rendered chat."""
    head, last = tokenizer.render_chat(chat[:i]), i == len(chat) - 1
    upto = text if last else tokenizer.render_chat(chat[: i + 1], to_answer=False)
    if upto.startswith(head) and text.startswith(upto):
        return len(head), len(upto)
    if last:
        raise UserError(
            "the chat template renders the prompt differently once it is answered, so the answer "
            "cannot be separated from it; set data.chat_template"
        )
    raise UserError(
        f"the chat template renders message {i + 1} differently in the whole chat (for example without its "
        "reasoning), so that its tokens cannot be found; set sft.learn=answer to learn the last turn only, "
        "or a data.chat_template with {% generation %}"
    )
