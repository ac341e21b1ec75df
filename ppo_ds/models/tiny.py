"""Creates tiny random models as Hugging Face folders: a character-level Llama, or one of any family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from ppo_ds.errors import UserError
from ppo_ds.models.loading import load_config
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(characters: str) -> Tokenizer:
    """Makes a tokenizer with a pad, an end and an unknown token, and one token per character.

    Encoding adds no special tokens.
    """
    tokens = [PAD, END, UNKNOWN, *characters]
    vocabulary = Vocabulary(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    vocabulary.decoder = decoders.Fuse()  # without it, decoded characters are joined by spaces
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=vocabulary, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left"
        )
    )


def tiny_llama(
    tokenizer: Tokenizer, *, hidden_size: int, layers: int, heads: int, max_tokens: int
) -> nn.Module:
    """Makes a LlamaForCausalLM in fp32 without tied embeddings or dropout.

    The random weights come from torch's global random state.
    """
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.stop_ids[0],
        pad_token_id=tokenizer.pad_id,
    )
    return LlamaForCausalLM(config)


def save(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights, config, generation config (with the end token) and tokenizer to ``folder``."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.stop_ids[0], pad_token_id=tokenizer.pad_id
    )
    model.save_pretrained(folder)
    tokenizer.save(folder)


# -- small models of any family -------------------------------------------------------------------------

HEAD, MOST_HEADS = 8, 16  # width of a head; maximum number of query heads that share a key head
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
# config keys that are set to the width of the model
_WIDTHS = ("hidden_size", "embedding_size", "pooler_hidden_size", "word_embed_proj_dim")
_INNERS = (
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "n_inner",
    "ffn_hidden_dim",
)
_EXPERT_INNERS = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
_AT_MOST = {  # upper bounds of other config values
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "max_window_layers": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": HEAD,
    "qk_nope_head_dim": HEAD, "v_head_dim": HEAD, "qk_head_dim": 2 * HEAD,
}  # fmt: skip


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy of the config with small widths and few layers, at least one of each kind.

    Besides embedding and head, the model has a few thousand parameters, or up to 300,000 if many query heads
    share a key head. Vocabulary, positions, activation, RoPE, windows, tied weights and special tokens are
    unchanged, as is the ratio of query to key heads up to MOST_HEADS.
    """
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()
    queries = getattr(text, "num_attention_heads", None) or 4
    keys = getattr(text, "num_key_value_heads", None) or queries
    group = queries // keys
    heads, key_heads = (4, 4) if group == 1 else (group, 1) if group <= MOST_HEADS else (4, 1)
    width = heads * HEAD
    values = (
        dict.fromkeys(_HEADS, heads)
        | dict.fromkeys(_WIDTHS, width)
        | dict.fromkeys(_INNERS, 2 * width)
        | dict.fromkeys(_EXPERT_INNERS, width)
    )
    values |= {"num_key_value_heads": key_heads, "head_dim": HEAD, "num_kv_heads": key_heads}
    for name, value in values.items():
        if getattr(text, name, None) is not None and not isinstance(
            getattr(type(text), name, None), property
        ):
            setattr(text, name, value)
    for name, most in _AT_MOST.items():
        if isinstance(given := getattr(text, name, None), int) and not isinstance(given, bool):
            setattr(text, name, min(given, most))
    _fewer_layers(text)
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        for name in ("short_factor", "long_factor"):  # LongRoPE: one factor per pair of a head's dimensions
            if isinstance(part.get(name), list):
                part[name] = part[name][: int(HEAD * part.get("partial_rotary_factor", 1.0)) // 2]
    return small


def _fewer_layers(config: Any) -> None:
    """Reduces a config and its per-layer lists to one layer of each kind, but at least to two layers."""
    before = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)] if kinds else []
    kept = sorted(kept + [i for i in range(before) if i not in kept][: max(0, 2 - len(kept))])
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before and before > 1:
            setattr(config, name, [value[i] for i in kept])
    for name in _LAYERS:
        if getattr(config, name, None) is not None:
            setattr(config, name, min(getattr(config, name), len(kept)))


def save_shrunk(
    path: str, folder: Path, *, revision: str | None, trust_remote_code: bool, language_model: bool, key: str
) -> None:
    """Writes a tiny random model with the architecture and the tokenizer of ``path`` to ``folder``.

    No weights are read. Its class is the one that config.json names, so it has a score head only if ``path``
    has one. With ``language_model`` it is always a causal LM. Errors name ``key``.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    tokenizer = load_tokenizer(path, revision, trust_remote_code, key=key)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    scores = not language_model and "SequenceClassification" in (config.architectures or [""])[0]
    small = shrunk(config)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if named is not None and not language_model:
                model = named(small)
            else:
                auto_class = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
                model = auto_class.from_config(small, trust_remote_code=trust_remote_code)
    except Exception as error:  # model code may raise anything for sizes that it does not expect
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{key}={path}: no tiny model of this architecture could be made "
            f"({type(error).__name__}: {reason}); run without run.dry_run"
        ) from error
    model.float().save_pretrained(folder)
    generation = GenerationConfig(eos_token_id=list(tokenizer.stop_ids), pad_token_id=tokenizer.pad_id)
    generation.save_pretrained(folder)
    tokenizer.save(folder)
