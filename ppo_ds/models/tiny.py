"""A tiny Llama and a character-level tokenizer made on the spot: nothing to download, and the folder is one like any other Hugging Face model's."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary
from tokenizers.models import WordLevel
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ppo_ds.models.tokenizer import Tokenizer

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(characters: str) -> Tokenizer:
    """One token for each of ``characters``, after pad, end and unknown; adds no special tokens by itself."""
    tokens = [PAD, END, UNKNOWN, *characters]
    vocabulary = Vocabulary(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    vocabulary.decoder = decoders.Fuse()  # without it, decoded characters are joined by spaces
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, padding_side="left"))


def tiny_llama(tokenizer: Tokenizer, *, hidden_size: int, layers: int, heads: int, max_tokens: int) -> nn.Module:
    """A LlamaForCausalLM in fp32 with random weights (torch's global random state), no tied embeddings and no dropout."""
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
    """Weights, config, generation config (its end token) and tokenizer, as ``from_pretrained`` reads them."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.stop_ids[0], pad_token_id=tokenizer.pad_id)
    model.save_pretrained(folder)
    tokenizer.save(folder)
