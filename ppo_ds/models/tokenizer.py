"""Loads Hugging Face tokenizers and wraps them with one pad id and one set of stop ids.

The wrapped tokenizer is never changed, except for a chat template from the config, so the loaded tokenizer is
saved with a trained model. Without a pad token the first end token is used for padding. Masks are never
computed from ids, so this cannot mask an end token inside a prompt.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import get_json_schema, render_jinja_template

from ppo_ds.config.similar_paths import did_you_mean_model
from ppo_ds.errors import UserError
from ppo_ds.models.download import UNREACHABLE, hub_arguments
from ppo_ds.models.loading import (
    NOT_REACHED,
    refuse_code_of_others,
    refuse_links,
    refuse_names_of_files_elsewhere,
)
from ppo_ds.storage.reading import memory_limit

Message = dict[str, str]  # {"role": ..., "content": ...}
SENTENCEPIECE = "run: pip install -c constraints.txt -e '.[sentencepiece]'"
TOKENIZER_FILE = "tokenizer.json"
# limits of rendering a chat template, which is a program from a model's folder
CHARACTERS = 10_000_000  # maximum length of a rendered chat, about 2.5 million tokens
SECONDS = 10.0  # maximum CPU time; most templates take less than a millisecond
BYTES = 2 * 1024**3  # maximum memory that all threads of the process may allocate during rendering
NEEDED = "the folder needs tokenizer.json and tokenizer_config.json"


class Tokenizer:
    """Converts texts and chats to ids and back."""

    def __init__(
        self,
        hf: PreTrainedTokenizerBase,
        end_ids: tuple[int, ...] = (),
        chat_template_kwargs: dict[str, Any] | None = None,
        key: str = "model.path",
    ):
        """Wraps ``hf``; raises UserError with ``key`` if ``hf`` has neither a pad nor an end token.

        ``end_ids`` are end tokens of the model's generation config, in addition to the tokenizer's own.
        """
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.hf = hf
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(own + end_ids))
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        if hf.pad_token_id is None and not self.stop_ids:
            raise UserError(
                f"{key}={hf.name_or_path}: the tokenizer has neither a pad nor an end token; "
                "name one in tokenizer_config.json"
            )
        self.pad_id: int = self.stop_ids[0] if hf.pad_token_id is None else hf.pad_token_id

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added tokens (a model's embedding may have more rows)."""
        return len(self.hf)

    @cached_property
    def id_bound(self) -> int:
        """The exclusive upper bound of all ids, including the end and pad ids.

        It may exceed ``vocab_size``, since the ids of a vocabulary may have gaps.
        """
        return 1 + max(*self.hf.get_vocab().values(), *self.stop_ids, self.pad_id)

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token; None if there is none or if it is also a pad, BOS or stop token."""
        unknown, others = self.hf.unk_token_id, (self.pad_id, self.hf.bos_token_id, *self.stop_ids)
        return None if unknown in others else unknown

    def count_unknown(self, rows: Iterable[Sequence[int]]) -> int:
        """Returns the number of rows of ids that contain the unknown token."""
        return 0 if self.unknown_id is None else sum(self.unknown_id in ids for ids in rows)

    @cached_property
    def joint(self) -> str:
        """The text between a prompt and an answer: a space, or "" if a space becomes the unknown token."""
        return "" if self.count_unknown([self.hf(" ", add_special_tokens=False)["input_ids"]]) else " "

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self.hf.chat_template)

    def encode_many(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        """Returns the ids of each text without truncation or padding.

        ``special_tokens`` includes the special tokens that the tokenizer adds, such as a leading BOS.
        """
        if not texts:
            return []
        return self.hf(
            texts, add_special_tokens=special_tokens, padding=False, truncation=False, verbose=False
        )["input_ids"]

    def render_chat(self, messages: list[Message], to_answer: bool = True) -> str:
        """Renders a chat as text; ``to_answer`` appends the marks that start the assistant's next message.

        Raises UserError if there is no chat template, or if the template rejects the chat.
        """
        if not self.has_chat_template:
            raise UserError(
                "a chat, but the tokenizer has no chat template; set data.chat_template=<Jinja or file>, "
                "or give prompts as text"
            )
        try:
            return render(self.hf, messages, add_generation_prompt=to_answer, **self.chat_template_kwargs)
        except TemplateFault as error:
            raise UserError(
                f"the chat template {error}; correct the row, or set data.chat_template"
            ) from error

    @cached_property
    def marks_answers(self) -> bool:
        """True if the chat template encloses the assistant's tokens in ``{% generation %}``."""
        # a tokenizer may have several named templates, in a dict
        return re.search(r"\{%-?\s*generation\s*-?%\}", str(self.hf.chat_template)) is not None

    def render_answers(self, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Renders a chat; returns its text and the character spans (start, end) in ``{% generation %}``.

        transformers makes the mask ``assistant_masks`` from the same spans.
        """
        try:
            with template_faults(messages):
                texts, spans = render_jinja_template(
                    [messages],
                    chat_template=self.hf.get_chat_template(),
                    return_assistant_tokens_mask=True,
                    **{**self.hf.special_tokens_map, **self.chat_template_kwargs},
                )
                text = checked_length(texts[0])
        except TemplateFault as error:
            raise UserError(
                f"the chat template {error}; correct the row, or set data.chat_template"
            ) from error
        return text, [(start, end) for start, end in spans[0] if start < end]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``ids``, exactly as decoded, without a cleanup of spaces."""
        return self.hf.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def with_padding(self, pad_id: int) -> Tokenizer:
        """Returns a copy with the same vocabulary that pads on the right with ``pad_id``."""
        hf = copy.deepcopy(self.hf)
        if hf.pad_token_id != pad_id:
            hf.pad_token = hf.convert_ids_to_tokens(pad_id)
        hf.padding_side = "right"
        return Tokenizer(hf, self.stop_ids, self.chat_template_kwargs)

    def with_tools(self, schemas: list[dict[str, Any]]) -> Tokenizer:
        """Returns a tokenizer that passes ``schemas``, the JSON schemas of tools, to the chat template."""
        return Tokenizer(self.hf, self.stop_ids, self.chat_template_kwargs | {"tools": schemas})

    def save(self, folder: str | Path) -> None:
        """Writes the files of the wrapped tokenizer."""
        self.hf.save_pretrained(folder)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function, from its type hints and the Args section of its docstring."""
    return get_json_schema(function)


def join_texts(prompt: str, response: str, joint: str) -> str:
    """Joins a prompt and a response by ``joint``, or by nothing if white space already separates them."""
    touching = not prompt or prompt[-1].isspace() or response[:1].isspace()
    return prompt + ("" if touching else joint) + response


class TemplateFault(ValueError):
    """Raised if a chat template is not valid Jinja, rejects a chat, or fails while rendering it."""


@contextmanager
def template_faults(messages: list[Message]) -> Iterator[None]:
    """Limits time and memory for rendering a chat inside the block; raises TemplateFault if it fails."""
    try:
        with rendering_limits():
            yield
    except Exception as error:  # a template is a program and may raise any exception, not only Jinja's
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, jinja2.TemplateSyntaxError):
            raise TemplateFault(f"is not Jinja (line {error.lineno}: {reason})") from error
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateFault(f"refuses a chat with the roles {roles} ({reason})") from error


def render(hf: PreTrainedTokenizerBase, messages: list[Message], **options: Any) -> str:
    """Renders a chat as text; raises TemplateFault if that fails."""
    with template_faults(messages):
        return checked_length(hf.apply_chat_template(messages, tokenize=False, **options))


def checked_length(text: str) -> str:
    """Returns the text; raises ValueError if it has more than CHARACTERS characters."""
    if len(text) > CHARACTERS:
        raise ValueError(f"renders {len(text)} characters, more than {CHARACTERS}")
    return text


def load_tokenizer(
    path: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    *,
    key: str = "model.path",
) -> Tokenizer:
    """Loads the tokenizer of a local folder or a Hub model; ``revision`` applies to the Hub only.

    ``chat_template``, a Jinja template, replaces the tokenizer's own. Errors name ``key``, the key of
    ``path``.
    """
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # a local folder takes precedence over a Hub name
        path, revision = str(folder), None
        refuse_links(path, key)
        refuse_names_of_files_elsewhere(path, key)
    elif path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or os.path.exists(folder):
        raise UserError(
            f"{key}={path}: no such folder; "
            "give a folder with a Hugging Face model and its tokenizer, or a Hub name"
            f"{did_you_mean_model(path)}"
        )
    if trust_remote_code:
        refuse_code_of_others(path, revision, key)
    try:
        tokenizer_class = (_python_tokenizer(path, revision) if trust_remote_code else None) or AutoTokenizer
        hf = tokenizer_class.from_pretrained(
            path, trust_remote_code=trust_remote_code, **hub_arguments(path, revision)
        )
    except Exception as error:  # the libraries may raise any exception, even a bare Exception
        remedy = _remedy(error, key)
        meant = did_you_mean_model(path) if remedy == UNREACHABLE else ""
        raise UserError(f"{key}={path}: {remedy}{meant}") from error
    # for some families transformers creates a tokenizer even without files
    if len(hf) <= len(hf.get_added_vocab()):
        raise UserError(f"{key}={path}: the tokenizer has no vocabulary; {NEEDED}")
    if chat_template is not None:
        hf.chat_template = chat_template
    return Tokenizer(hf, _generation_end_ids(path, revision, key), chat_template_kwargs, key)


def _python_tokenizer(path: str, revision: str | None) -> Any | None:
    """Returns the Python tokenizer class in a model's own code, or None if transformers may choose the class.

    The class is needed if the code also has a fast class and the model has no tokenizer.json. transformers 5
    would use the fast class and convert the vocabulary without the converter in the model's code. InternLM2's
    special tokens, for example, would get ids that differ from training and are outside of the embedding.
    """
    where = hub_arguments(path, revision)
    code = get_tokenizer_config(path, **where).get("auto_map") or {}
    classes = code.get("AutoTokenizer") if isinstance(code, dict) else code
    if not isinstance(classes, list) or len(classes) != 2 or None in classes:
        return None
    if cached_file(path, TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False, **where):
        return None
    tokenizer_class = get_class_from_dynamic_module(classes[0], path, **where)
    tokenizer_class.register_for_auto_class()  # so that the code is saved with the tokenizer
    return tokenizer_class


def _remedy(error: Exception, key: str) -> str:
    """Explains why a tokenizer could not be loaded, and suggests a remedy."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        switch = key.removesuffix("path") + "trust_remote_code"
        return f"the model runs its own code; if you trust it, set {switch}=true"
    if NOT_REACHED in text:
        return UNREACHABLE
    if isinstance(error, ImportError):
        if "sentencepiece" in text.lower():
            return f"its tokenizer needs the package sentencepiece, which is not installed; {SENTENCEPIECE}"
        return f"its tokenizer cannot be imported ({text[:300]}); install what it needs"
    if isinstance(error, OSError):
        remedy = "give a local folder, or a Hub name that exists and is reachable or cached"
        return f"cannot be loaded: {text[:300]} ({remedy})"
    return f"no tokenizer could be loaded ({type(error).__name__}: {text[:300]}); {NEEDED}"


def _generation_end_ids(path: str, revision: str | None, key: str) -> tuple[int, ...]:
    """Returns the end tokens in generation_config.json.

    Chat models often end turns with a token other than the tokenizer's EOS; the file then lists both tokens.
    """
    try:
        ids = GenerationConfig.from_pretrained(path, **hub_arguments(path, revision)).eos_token_id
    except (OSError, TypeError, RecursionError) as error:  # most often the model has no such file
        if (Path(path) / "generation_config.json").exists():
            raise UserError(
                f"{key}={path}: generation_config.json cannot be read; correct or remove it"
            ) from error
        return ()
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


@contextmanager
def rendering_limits() -> Iterator[None]:
    """Raises TimeoutError or MemoryError inside the block if a template exceeds SECONDS or BYTES.

    The limit of CPU time applies in the main thread only and is checked between the operations of the
    template. The memory limit applies on Linux only.
    """
    before, in_main_thread = None, threading.current_thread() is threading.main_thread()
    try:
        if in_main_thread:
            before = signal.signal(signal.SIGVTALRM, _time_is_over)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        with memory_limit(BYTES):
            yield
    finally:
        if in_main_thread:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


def _time_is_over(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {SECONDS:.0f} s")
