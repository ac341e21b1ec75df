"""Tests that `memory.layout` applies to each model separately, with a warning if a model cannot be packed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig, NemotronConfig

from ppo_ds.assemble.ppo_models import choose_layouts
from ppo_ds.errors import UserError
from ppo_ds.models import packed_attention as attention
from ppo_ds.models.policy import Policy

SMALL = dict(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=8,
    pad_token_id=0,
)
EXPERTS = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
RANKS = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
LLAMA, WINDOW, NEMOTRON = (
    LlamaConfig(**SMALL),
    MistralConfig(**SMALL, sliding_window=4),
    NemotronConfig(**SMALL, num_key_value_heads=2, head_dim=8),
)
WIDE_KEYS = DeepseekV3Config(**SMALL, **EXPERTS, **RANKS)  # keys of size 16, values of size 8


class Role:
    """Stands in for a model held by an engine."""

    def __init__(self, config, device="cpu", dtype=torch.float32):
        torch.manual_seed(0)
        self.module = Policy(AutoModelForCausalLM.from_config(config).to(dtype).eval(), 1.0)
        self.world = SimpleNamespace(device=torch.device(device))
        self.calls = 0

    def resident(self):
        return nullcontext()

    def __call__(self, *args):
        self.calls += 1
        return self.module(*args)


def chosen(layout, *roles, parts=1):
    actor, reference = [*roles, None][:2]
    memory = SimpleNamespace(layout=layout, sequence_parallel=parts)
    return choose_layouts(SimpleNamespace(memory=memory), actor, reference, None)


@pytest.fixture
def gpu(monkeypatch):
    """Simulates a GPU. A CPU computation replaces the kernel, for the head sizes that the kernel supports."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "has_kernel", lambda query, value: query.shape[-1] == value.shape[-1])

    def kernel(q, k, v, ends, *_, scale, enable_gqa=False, **__):
        assert enable_gqa or q.shape[1] == k.shape[1]
        return attention.attention_per_sequence(q, k, v, ends.tolist(), scale)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    return {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize(("layout", "llama"), [("packed", True), ("padded", False), ("auto", False)])
def test_the_layout_is_decided_for_each_model_separately(layout, llama):
    actor, reference = Role(LLAMA), Role(WINDOW)
    notes = chosen(layout, actor, reference)
    assert (actor.module.packed, reference.module.packed) == (llama, False)
    refused = (
        "warning    memory.layout=packed: the reference's rows are padded: "
        "MistralForCausalLM has layers other than full attention"
    )
    assert notes == ([f"{refused} (sliding_attention)"] if layout == "packed" else [])


def test_on_a_gpu_models_with_a_kernel_are_packed(gpu):
    actor, reference = Role(LLAMA, **gpu), Role(WIDE_KEYS, **gpu)
    lines = ["layout     actor packed", "layout     reference padded: no kernel supports its heads"]
    assert chosen("auto", actor, reference) == lines
    assert (actor.module.packed, reference.module.packed) == (True, False)
    assert (actor.calls, reference.calls) == (2, 2)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "reason"),
    [
        ("cuda", torch.float32, (9, 0), "the kernel for packed rows does not take float32"),
        ("cuda", torch.bfloat16, (7, 5), "the kernel for packed rows needs an A100 or a later GPU"),
    ],
)
def test_on_a_gpu_the_banner_says_why_rows_are_padded(monkeypatch, device, dtype, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen("auto", Role(LLAMA, device, dtype)) == [f"layout     actor padded: {reason}"]
    assert chosen("padded", Role(LLAMA, device, dtype)) == ["layout     actor padded: memory.layout=padded"]


def test_torch_2_11_packs_grouped_heads(gpu, monkeypatch):
    """The kernel of torch 2.11 has no argument for fewer heads of key and value than of the query."""
    monkeypatch.setattr(attention, "_GROUPED", False)
    actor = Role(LlamaConfig(**SMALL, num_key_value_heads=1), **gpu)
    assert chosen("auto", actor) == ["layout     actor packed"]


def test_on_a_gpu_packing_without_a_kernel_is_reported(gpu):
    actor = Role(WIDE_KEYS, **gpu)
    no_kernel = (
        "warning    memory.layout=packed: no kernel supports the actor's heads: attention "
        "is computed one sequence after the other"
    )
    assert chosen("packed", actor) == [no_kernel] and actor.module.packed


@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_layers_without_sequence_boundaries_are_detected(gpu, layout):
    """Nemotron's layers drop the boundaries, although the class declares its attention replaceable."""
    actor = Role(NEMOTRON, **gpu)
    reason = "NemotronAttention does not receive the ends of the sequences in a packed row"
    assert chosen(layout, actor) == [
        f"warning    memory.layout={layout}: the actor's rows are padded: {reason}"
    ]
    assert (
        not actor.module.packed
        and torch.isfinite(actor(torch.ones(2, 4).long(), torch.ones(2, 4).bool(), 2).logprobs).all()
    )


def test_rows_that_attend_to_each_other_are_detected(monkeypatch):
    """Replaces the attention by one that ignores the sequence boundaries that it receives."""
    monkeypatch.setattr(
        attention,
        "attention_per_sequence",
        lambda q, k, v, ends, scale, by=attention.attention_per_sequence: by(q, k, v, [0, ends[-1]], scale),
    )
    actor = Role(LlamaConfig(**SMALL, initializer_range=0.3))
    assert chosen("packed", actor) == [
        (
            "warning    memory.layout=packed: the actor's rows are padded: "
            "LlamaForCausalLM computes other states in packed rows"
        )
    ]
    assert not actor.module.packed


def test_ranks_divide_packed_rows_of_models_whose_heads_they_divide():
    actor = Role(LLAMA)
    (line,) = chosen("auto", actor, parts=2)
    assert "2 ranks divide the tokens of a forward" in line and actor.module.packed
    with pytest.raises(UserError) as refused:
        chosen("auto", Role(LLAMA), Role(WINDOW), parts=4)
    assert refused.value.problems == [
        "memory.sequence_parallel=4: the actor: its 2 attention heads and 2 key-value heads are not "
        "divisible by it; the reference: its rows cannot be packed"
    ]
