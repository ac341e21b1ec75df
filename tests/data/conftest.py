"""Provides a byte-level tokenizer (one id per byte), and writers of data files."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ppo_ds.config.sections.data import PPODataConfig
from ppo_ds.data.prompts import PromptSource
from ppo_ds.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% "
    "endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def options_of(**options):
    """Returns the arguments of a source; those that are keys of the section data become its section."""
    keys = PPODataConfig.model_fields.keys() - {"split", "max_samples"}
    section = {name: value for name, value in options.items() if name in keys}
    others = {name: value for name, value in options.items() if name not in keys}
    return {"data": PPODataConfig(**section), **others}


def make_tokenizer(pad="<pad>", template=TEMPLATE, adds_bos=False):
    """Makes a tokenizer with the ids <eos> 0, <pad> 1, then the 256 bytes in the order of their characters.

    With ``adds_bos`` texts begin with <eos>, as with GPT-like tokenizers.
    """
    vocab = {
        token: i for i, token in enumerate(["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", 0)]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token=pad)
    hf.chat_template = template
    return Tokenizer(hf)


@pytest.fixture
def byte_tokenizer():
    return make_tokenizer


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (objects or raw lines) to a file and returns its path."""

    def write(*rows, name="data.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def source(jsonl, tokenizer):
    """Builds a source of text prompts or whole rows."""

    def make(*prompts, **options):
        rows = [{"prompt": p, "n": i} if isinstance(p, str) else p for i, p in enumerate(prompts)]
        return PromptSource(
            jsonl(*rows),
            **options_of(
                **{"tokenizer": tokenizer, "max_new_tokens": 9, "apply_chat_template": False, **options}
            ),
        )

    return make
