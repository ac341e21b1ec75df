"""Tests the conversion of weights in memory to those of a checkpoint, decoder layer by decoder layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from ppo_ds.engine.hybrid import by_layer
from ppo_ds.models.lora import add_adapters, checkpoint_tensors, plain_weights, tied_names
from tests.support.models import SIZES

CONFIGS = {
    "llama": LlamaConfig(vocab_size=11, **SIZES),
    "tied": LlamaConfig(vocab_size=11, tie_word_embeddings=True, **SIZES),
    "gpt2": GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "mixtral": MixtralConfig(vocab_size=11, num_key_value_heads=1, num_local_experts=3, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=11,
        num_key_value_heads=1,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        **SIZES,
    ),
}


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_equal_those_of_a_saved_model(tmp_path: Path, family: str, reloaded: bool) -> None:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(CONFIGS[family])
    lm.save_pretrained(tmp_path)
    if reloaded:
        lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for layer in by_layer(plain_weights(lm)):
        found |= checkpoint_tensors(lm, {weight.name: weight.merged(torch.device("cpu")) for weight in layer})
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_groups_are_decoder_layers() -> None:
    lm = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    add_adapters(lm, rank=2, alpha=4, targets=None, seed=1, key="actor.lora")
    groups = by_layer(plain_weights(lm))
    sizes = {group[0].name.partition("self_attn")[0]: len(group) for group in groups}
    assert sizes == {
        "model.embed_tokens.weight": 1,
        "model.layers.0.": 9,
        "model.layers.1.": 9,
        "model.norm.weight": 1,
        "lm_head.weight": 1,
    }


def test_names_of_tied_weights() -> None:
    models = {name: AutoModelForCausalLM.from_config(CONFIGS[name]) for name in ("llama", "tied", "gpt2")}
    assert tied_names(models["llama"]) == {}
    assert tied_names(models["tied"]) == {"model.embed_tokens.weight": ["lm_head.weight"]}
    assert tied_names(models["gpt2"]) == {"transformer.wte.weight": ["lm_head.weight"]}
