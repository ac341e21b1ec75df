"""The actor's tokenizer, as the rest of the package sees it: plain ids in and out, one pad id, one set of
stop ids.

The wrapped Hugging Face tokenizer is never changed, except for a chat template that the user gave: what is
saved beside a trained model is what was loaded. Where there is no pad token the first end token fills the
padding; masks never come from ids, so this cannot hide an end token inside a prompt.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ppo_ds.errors import UserError
from ppo_ds.models.loading import NOT_REACHED, UNREACHABLE

Message = dict[str, str]  # {"role": ..., "content": ...}
NEEDED = "the folder needs tokenizer.json and tokenizer_config.json"


class Tokenizer:
    """Text and chats to ids and back."""

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        end_ids: tuple[int, ...] = (),
        chat_template_kwargs: dict[str, Any] | None = None,
        key: str = "model.path",
    ):
        """``end_ids``: end tokens that the model's generation config names beside the tokenizer's own.

        ``key``: see load_tokenizer.
        """
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.hf = hf
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(own + end_ids))
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        if hf.pad_token_id is None and not self.stop_ids:
            raise UserError(
                f"{key}={hf.name_or_path}: the tokenizer has neither a pad nor an end token; name one in tokenizer_config.json"
            )
        self.pad_id: int = self.stop_ids[0] if hf.pad_token_id is None else hf.pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's embedding may have more rows)."""
        return len(self.hf)

    @cached_property
    def id_bound(self) -> int:
        """Every id that it gives is below, those of its ends and its padding too.

        A vocabulary may have gaps.
        """
        return 1 + max(*self.hf.get_vocab().values(), *self.stop_ids, self.pad_id)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.hf.chat_template)

    def encode_many(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        """Uncut, unpadded ids of each text; ``special_tokens``: with those that the tokenizer adds by itself,
        such as a first BOS.
        """
        if not texts:
            return []
        return self.hf(
            texts, add_special_tokens=special_tokens, padding=False, truncation=False, verbose=False
        )["input_ids"]

    def render_chat(self, messages: list[Message], to_answer: bool = True) -> str:
        """The chat as text; ``to_answer``: up to where the assistant's next answer begins, else it is
        complete.
        """
        if not self.has_chat_template:
            raise UserError(
                "a chat, but the tokenizer has no chat template; set data.chat_template=<Jinja or file>, or give prompts as text"
            )
        try:
            return render(self.hf, messages, add_generation_prompt=to_answer, **self.chat_template_kwargs)
        except TemplateFault as error:
            raise UserError(f"the chat template {error}; mend the row, or set data.chat_template") from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.hf.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def save(self, folder: str | Path) -> None:
        self.hf.save_pretrained(folder)


class TemplateFault(ValueError):
    """A chat template that is not Jinja, refuses a chat, or fails in the middle of it."""


def render(hf: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> str:
    """A chat as text."""
    try:
        return hf.apply_chat_template(messages, tokenize=False, **options)
    except (
        Exception
    ) as error:  # a template is a program: beside Jinja's errors it raises what Python's operators do
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, jinja2.TemplateSyntaxError):
            raise TemplateFault(f"is not Jinja (line {error.lineno}: {reason})") from error
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateFault(f"refuses a chat with the roles {roles} ({reason})") from error


def load_tokenizer(
    path: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    *,
    key: str = "model.path",
) -> Tokenizer:
    """The tokenizer of a local folder or a Hub model; ``revision`` is for the Hub only.

    ``chat_template`` (a Jinja template, or a file that holds one) replaces the tokenizer's own; ``key`` is
    the config key that errors name.
    """
    path, revision = _located(path, revision, key)
    try:
        hf = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # the libraries below raise anything from OSError to a bare Exception for a folder that is not right
        raise UserError(f"{key}={path}: {_remedy(error, key)}") from error
    if len(hf) <= len(hf.get_added_vocab()):  # transformers makes some families' tokenizers of nothing
        raise UserError(f"{key}={path}: the tokenizer has no vocabulary; {NEEDED}")
    if chat_template is not None:
        hf.chat_template = _template(chat_template)
    return Tokenizer(hf, _generation_end_ids(path, revision, key), chat_template_kwargs, key)


def _located(path: str, revision: str | None, key: str) -> tuple[str, str | None]:
    """A local folder wins over a Hub name, and has no revision."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return str(folder), None
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or folder.exists():
        raise UserError(
            f"{key}={path}: no such folder; give a folder with a Hugging Face model and its tokenizer, or a Hub name"
        )
    return path, revision


def _remedy(error: Exception, key: str) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"the model runs its own code; if you trust it, set {key.removesuffix('path')}trust_remote_code=true"
    if NOT_REACHED in text:
        return UNREACHABLE
    if isinstance(error, OSError):
        return f"cannot be had: {text[:300]} (give a local folder, or a Hub name that exists and is reachable or cached)"
    return f"no tokenizer could be loaded ({type(error).__name__}: {text[:300]}); {NEEDED}"


def _template(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(os.path.expanduser(given)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"data.chat_template={given}: neither a Jinja template nor a file that can be read ({reason})"
        ) from error


def _generation_end_ids(path: str, revision: str | None, key: str) -> tuple[int, ...]:
    """Chat models often end turns with another token than the tokenizer's EOS; generation_config.json then
    lists both.
    """
    try:
        ids = GenerationConfig.from_pretrained(path, revision=revision).eos_token_id
    except OSError as error:  # most often there is none
        if (Path(path) / "generation_config.json").exists():
            raise UserError(
                f"{key}={path}: generation_config.json cannot be read; mend or remove it"
            ) from error
        return ()
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
