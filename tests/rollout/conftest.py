"""Fixtures for causal LMs whose next-token distribution is given by the test."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.models.tiny import character_tokenizer
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts


@pytest.fixture
def chain():
    """Returns a function that makes a Llama whose logits after token i are table[i], for a table [V,V].

    The embedding is one-hot and the only layer adds zero.
    """

    def make(table):
        width = len(table)
        config = LlamaConfig(
            vocab_size=width, hidden_size=width, intermediate_size=4, num_hidden_layers=1,
            num_attention_heads=1, head_dim=2,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            rms_norm_eps=1e-12,
        )  # fmt: skip
        lm = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            lm.model.embed_tokens.weight.copy_(torch.eye(width))
            lm.model.layers[0].self_attn.o_proj.weight.zero_()
            lm.model.layers[0].mlp.down_proj.weight.zero_()
            # the norm scales one-hot vectors by sqrt(width)
            lm.lm_head.weight.copy_(torch.as_tensor(table, dtype=torch.float32).t() / width**0.5)
        return lm

    return make


@pytest.fixture
def successor(chain):
    """Makes a chain that generates the successors in {token: next token}, with greedy decoding or sampling.

    Tokens without a successor are repeated.
    """

    def make(following, vocab_size):
        table = torch.zeros(vocab_size, vocab_size)
        for token in range(vocab_size):
            table[token, following.get(token, token)] = 50.0
        return chain(table)

    return make


@pytest.fixture
def tokenizer():
    """Makes a tokenizer with the given texts as tokens after <pad> 0, <eos> 1 and <unk> 2."""
    return character_tokenizer


@pytest.fixture
def prompts():
    """Makes left-padded Prompts from rows of ids; the padding holds ``pad``.

    Without ``limits`` only the limit of the sampling parameters applies.
    """

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
