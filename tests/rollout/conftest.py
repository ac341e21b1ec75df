"""Causal LMs whose next-token distribution is written down by the test, decoded by transformers like any other."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts


@pytest.fixture
def chain():
    """table [V,V] -> a Llama whose logits after token i are table[i]: the embedding is one-hot, the only layer adds nothing."""

    def make(table):
        width = len(table)
        config = LlamaConfig(
            vocab_size=width, hidden_size=width, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, head_dim=2,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None, rms_norm_eps=1e-12,
        )  # fmt: skip
        lm = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            lm.model.embed_tokens.weight.copy_(torch.eye(width))
            lm.model.layers[0].self_attn.o_proj.weight.zero_()
            lm.model.layers[0].mlp.down_proj.weight.zero_()
            lm.lm_head.weight.copy_(
                torch.as_tensor(table, dtype=torch.float32).t() / width**0.5
            )  # the norm scales one-hot by sqrt(width)
        return lm

    return make


@pytest.fixture
def successor(chain):
    """{token: next token} -> a chain that always goes there, greedy or drawn; tokens without a successor repeat themselves."""

    def make(following, vocab_size):
        table = torch.zeros(vocab_size, vocab_size)
        for token in range(vocab_size):
            table[token, following.get(token, token)] = 50.0
        return chain(table)

    return make


@pytest.fixture
def tokenizer():
    """texts -> a tokenizer with those tokens after <pad> 0, <eos> 1 and <unk> 2."""
    return character_tokenizer


@pytest.fixture
def prompts():
    """Rows of ids -> left-padded Prompts; the padding holds ``pad``. Without ``limits`` the sampler's is the only one."""

    def make(*rows, pad=0, limits=None):
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        return Prompts(
            ids,
            mask,
            torch.tensor(limits or [10**6] * len(rows)),
            tuple({"row": i} for i in range(len(rows))),
        )

    return make


@pytest.fixture
def sampling():
    def make(max_new_tokens, **changes):
        neutral = dict(
            min_new_tokens=0, temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=(), stop_strings=()
        )
        return SamplingParams(max_new_tokens, **neutral | changes)

    return make
