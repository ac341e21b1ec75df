"""Encodes the prompt of an environment, and its feedback as the tokens between two turns of the policy.

The tokens of the prompt and of the policy are kept and never encoded again, since encoding their text might
yield different tokens. For a chat, the tokens between two turns are found by rendering a short conversation
with and without the feedback. If the policy has sampled the end token, it is not added again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppo_ds.environments.base import InvalidResult
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Row

_ANSWER = "This is the content of an answer."  # stands for the turn of the policy before the feedback
# A template may keep thoughts before results of tools, and add an empty thought to a last answer without one.
_THOUGHTS = ("", "<think>\nA thought.\n</think>\n\n")


def encode_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message] | None, row: Row, limit: int, has_tools: bool
) -> tuple[list[int], Row] | None:
    """Returns the prompt's tokens and the row with the new prompt.

    Returns None, to keep the prompt of the data, if ``messages`` is None and there are no tools. A prompt of
    more than ``limit`` tokens is truncated on the left. Raises InvalidResult for a prompt without tokens and,
    with tools, for a prompt that is too long or is not a chat.
    """
    if messages is None and has_tools:
        messages = row.get("messages")
        if messages is None:
            raise InvalidResult("has tools, but the prompt is a text; set data.apply_chat_template=true")
    if messages is None:
        return None
    is_chat, text = tokenizer.has_chat_template, "".join(message["content"] for message in messages)
    if is_chat:
        text = tokenizer.render_chat(list(messages))
    ids = _encode(tokenizer, text, special_tokens=not is_chat)
    if not ids:
        raise InvalidResult("returned a prompt without tokens")
    if has_tools and len(ids) > limit:
        raise InvalidResult(f"has a prompt of {len(ids)} tokens with its tools; raise data.max_prompt_tokens")
    return ids[-limit:], row | {"prompt_text": text} | ({"messages": list(messages)} if is_chat else {})


def encode_chat(tokenizer: Tokenizer, feedback: tuple[Message, ...], last_id: int) -> list[int]:
    """Returns the tokens that follow a turn of the policy whose last token is ``last_id``.

    Raises UserError if the chat template refuses the messages, or if feedback changes the rendering of the
    earlier conversation, whose tokens would then differ.
    """
    question = {"role": "user", "content": "A question."}
    for thought in _THOUGHTS:
        chat = [question, {"role": "assistant", "content": thought + _ANSWER}]
        before = tokenizer.render_chat(chat, to_answer=False)
        after = tokenizer.render_chat([*chat, *feedback])
        if after.startswith(before):
            break
    else:
        roles = ", ".join(message["role"] for message in feedback)
        raise UserError(
            "the chat template changes the messages before an answer when messages with the roles "
            f"{roles} follow it; set data.chat_template to one that keeps them, or use another role "
            "for the feedback"
        )
    start = before.rindex(_ANSWER) + len(_ANSWER)
    end_of_answer, ids = _encode(tokenizer, before[start:]), _encode(tokenizer, after[start:])
    end = ids[: len(end_of_answer)]
    # a stop string, such as a line break, may also occur after the template's end token
    is_end = last_id in tokenizer.stop_ids or end[:1] == [last_id]
    return ids[end.index(last_id) + 1 :] if is_end and last_id in end else ids


def _encode(tokenizer: Tokenizer, text: str, special_tokens: bool = False) -> list[int]:
    return tokenizer.encode_many([text], special_tokens=special_tokens)[0]
