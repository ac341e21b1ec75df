"""`memory.layout` to the models: each decides for itself, and says so where it cannot do as it was told."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from ppo_ds.roles import choose_layouts

SMALL = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def role(trunk):
    return SimpleNamespace(module=SimpleNamespace(trunk=trunk, packed=None), world=SimpleNamespace(device=torch.device("cpu")))


@pytest.mark.parametrize(("layout", "llama"), [("packed", True), ("padded", False), ("auto", False)])
def test_each_model_decides_for_itself(layout, llama):
    actor, reference = role(LlamaForCausalLM(LlamaConfig(**SMALL))), role(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)))
    notes = choose_layouts(SimpleNamespace(memory=SimpleNamespace(layout=layout)), actor, reference, None)
    assert (actor.module.packed, reference.module.packed) == (llama, False)
    refused = "warning    memory.layout=packed: the reference's rows are padded: MistralForCausalLM has layers other than full attention"
    assert notes == ([f"{refused} (sliding_attention)"] if layout == "packed" else [])
