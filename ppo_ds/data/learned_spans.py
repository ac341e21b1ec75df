"""Finds the characters of a rendered chat that have a language-modelling loss ("learned").

A chat template may mark the assistant's text with ``{% generation %}``. Otherwise a turn is found by
rendering the chat up to its start and up to its end. The rendered whole chat must begin with both of these
texts, or at least as end_before_next requires. Other chats are errors, for example if the template drops the
reasoning of earlier turns.
"""

from __future__ import annotations

from typing import Literal

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer

Learn = Literal["answer", "assistant", "all"]  # see sft.learn
Span = tuple[int, int]  # [first character, end)


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
        # if the assistant begins the chat, its first message has no prompt and is not learned
        turns = [i for i, message in enumerate(chat) if i and message["role"] == "assistant"]
        spans = [turn_span(tokenizer, chat, i, text) for i in (turns[-1:] if learn == "answer" else turns)]
    return text, spans[-1:] if learn == "answer" else spans


def turn_span(tokenizer: Tokenizer, chat: list[Message], i: int, text: str) -> Span:
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
    end = end_before_next(tokenizer, chat, i, text)
    # without this check, the model would learn to omit a part of a turn that the template drops
    if end is None or not text.startswith(head) or chat[i]["content"].strip() not in text[len(head) : end]:
        raise UserError(
            f"the chat template renders message {i + 1} differently in the whole chat (for example without "
            "its reasoning), so that its tokens cannot be found; set sft.learn=answer to learn the last turn "
            "only, or a data.chat_template with {% generation %}"
        )
    return len(head), end


def end_before_next(tokenizer: Tokenizer, chat: list[Message], i: int, text: str) -> int | None:
    """Returns the end of message ``i``, found from the start of the next message, or None if not found.

    The template of Qwen3 adds an empty reasoning only to the last answer. Then the rendered whole chat
    does not begin with the chat up to an earlier answer, but with the chat up to the message after it.
    """
    before = tokenizer.render_chat(chat[:i], to_answer=False)
    try:
        without_turn = tokenizer.render_chat([*chat[:i], chat[i + 1]], to_answer=False)
    except UserError:  # the template requires that roles alternate
        return None
    with_turn = tokenizer.render_chat(chat[: i + 2], to_answer=False)
    following = without_turn.removeprefix(before)
    found = text.startswith(with_turn) and without_turn.startswith(before) and with_turn.endswith(following)
    return len(with_turn) - len(following) if found else None
