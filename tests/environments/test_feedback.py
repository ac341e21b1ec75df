"""Tests the tokens of feedback: they continue the sampled tokens as the chat template would."""

import pytest

from ppo_ds.environments.feedback import encode_chat
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.models.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the end token is not directly after the content
SPACED = CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }} <|im_end|>")
# removes the content of every assistant message but the last one, like templates that remove thoughts
FORGETTING = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content[:4] }}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    + (CHATML.partition("%}")[2])
)
FEEDBACK = ({"role": "user", "content": "so"},)


def chat_tokenizer(template):
    characters = "abcdefghijklmnopqrstuvwxyzATQ0123456789?.|<>_\n "
    hf = character_tokenizer(characters).hf
    hf.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    hf.chat_template = template
    return Tokenizer(hf, end_ids=(hf.convert_tokens_to_ids("<|im_end|>"),))


def text_after(tokenizer, last, feedback=FEEDBACK):
    """Returns the text of the tokens that follow a turn which ends with the token ``last``."""
    last_id = tokenizer.hf.convert_tokens_to_ids(last)
    ids = encode_chat(tokenizer, feedback, last_id)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_end_token_that_the_policy_sampled_is_not_repeated():
    """A turn may also end with another end token or a stop string; the template's end token follows then."""
    tokenizer, rest = chat_tokenizer(CHATML), "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    assert text_after(tokenizer, "<|im_end|>") == rest
    assert text_after(tokenizer, "<eos>") == "<|im_end|>" + rest
    assert text_after(tokenizer, "o") == "<|im_end|>" + rest
    spaced = rest.replace("so<", "so <")
    assert text_after(chat_tokenizer(SPACED), "<|im_end|>") == spaced
    assert text_after(chat_tokenizer(SPACED), "o") == " <|im_end|>" + spaced


def test_only_an_end_token_is_skipped_in_the_middle_of_the_template():
    """sampling.stop may be a line break, which ChatML has after its end token."""
    rest = "\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    assert text_after(chat_tokenizer(CHATML), "\n") == "<|im_end|>" + rest
    lines = "{% for m in messages %}{{ m.role }}? {{ m.content }}\n{% endfor %}"
    assert text_after(chat_tokenizer(lines), "\n") == "user? so\n"  # the line break ends an answer
    assert text_after(chat_tokenizer(lines), "o") == "\nuser? so\n"


def test_prompt_turn_and_feedback_are_the_conversation_of_the_template():
    tokenizer = chat_tokenizer(CHATML)
    prompt, feedback = [{"role": "user", "content": "go"}], [{"role": "tool", "content": "3"}, *FEEDBACK]
    text = tokenizer.render_chat(prompt) + "abc<|im_end|>" + text_after(tokenizer, "<|im_end|>", feedback)
    assert text == tokenizer.render_chat([*prompt, {"role": "assistant", "content": "abc"}, *feedback])


def test_a_template_that_changes_earlier_messages_is_refused():
    with pytest.raises(UserError) as caught:
        text_after(chat_tokenizer(FORGETTING), "<|im_end|>")
    assert str(caught.value) == (
        "the chat template changes the messages before an answer when messages with the roles user follow "
        "it; set data.chat_template to one that keeps them, or use another role for the feedback"
    )


def test_a_template_that_refuses_a_role_is_named():
    with pytest.raises(
        UserError, match="^the chat template refuses a chat with the roles user, assistant, tool"
    ):
        text_after(chat_tokenizer(STRICT), "<|im_end|>", ({"role": "tool", "content": "1"},))
