"""Tiny Hugging Face models of the tests."""

from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, OPTConfig, Qwen2Config

SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


def decoders(vocab_size, std, dropout):
    """Returns by family a function that makes the config of a tiny causal language model."""
    small = dict(vocab_size=vocab_size, **SIZES, initializer_range=std, attention_dropout=dropout)
    return {
        "llama": lambda: LlamaConfig(**small, num_key_value_heads=1, tie_word_embeddings=False),
        "qwen2": lambda: Qwen2Config(**small, num_key_value_heads=1, tie_word_embeddings=True),
        "gpt2": lambda: GPT2Config(
            vocab_size=vocab_size, n_embd=16, n_layer=2, n_head=2, initializer_range=std,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=None, eos_token_id=None,
        ),
        "gpt_neox": lambda: GPTNeoXConfig(**small, hidden_dropout=dropout),
        "opt": lambda: OPTConfig(
            vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
            word_embed_proj_dim=16, init_std=std, max_position_embeddings=64,
            dropout=dropout, attention_dropout=dropout, layerdrop=dropout,
        ),
    }  # fmt: skip
