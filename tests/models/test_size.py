"""Tests model sizes, including the model whose FLOPs tests/ops/test_flops.py computes by hand."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from ppo_ds.compute.sizes import Size, forward_flops
from ppo_ds.models.size import size_of

SHAPE = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama(tied):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    assert size_of(model) == Size(body=1192, head=80, layers=2, width=8, kv_width=4)


def test_a_sharded_parameter_counts_whole():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)  # as in DeepSpeed's ZeRO-3 between forwards
    assert size_of(model).body == 1192


def test_a_classifier_has_its_score_row_in_the_body():
    model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1))
    assert size_of(model) == Size(body=1200, head=0, layers=2, width=8, kv_width=4)


def test_a_gpt2():
    # a layer: qkv 8x24+24, projection 8x8+8, MLP 8x32+32 and 32x8+8, two norms of 16: 872;
    # the last norm: 16; the position embedding: 4 positions x 8
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=4, n_embd=8, n_layer=1, n_head=2))
    assert size_of(model) == Size(body=872 + 16 + 32, head=80, layers=1, width=8, kv_width=8)


def test_a_model_without_attention_has_no_keys_and_values():
    size = size_of(
        MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3, state_size=4))
    )
    assert (size.layers, size.width, size.kv_width) == (3, 0, 0) and size.body > 0


def test_a_mixture_of_experts_has_idle_ones():
    # an expert: gate, up and down of 8x16 each, 384; a token uses 1 of 4 in each of 2 layers; router: 8x4.
    # The rest is like the Llama, whose MLP also has 384: the body is 1192 + 2 x (3 x 384 + 32)
    size = size_of(MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=1)))
    assert (size.body, size.idle) == (3560, 2 * 3 * 384)
    assert forward_flops(size, 10, 0, 0) == 2 * 10 * (3560 - 2304)


def test_shared_experts_are_not_idle():
    # in each of 2 layers a token uses 2 of 4 routed experts (3 x 8x4 = 96 each) and the shared expert
    config = Qwen2MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=16,
    )
    assert size_of(Qwen2MoeForCausalLM(config)).idle == 2 * 2 * 96
