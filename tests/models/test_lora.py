"""Tests LoRA adapters on tiny random models.

The independent references are the chain rule on the gradients of a plain model, and peft, which loads what
is saved.
"""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.lora import (
    adapter_parameters,
    add_adapters,
    merged_state,
    plain_modules,
    plain_weights,
    without_adapters,
)
from ppo_ds.models.policy import load_policy, unsharded_twin
from ppo_ds.models.value import load_critic
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import generate
from tests.support.models import decoders

V = 60
FAMILIES = decoders(V, std=0.3, dropout=0.0)
LINEAR = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "qwen2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
}
EVERY = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.randint(4, V, (3, 7), generator=torch.Generator().manual_seed(1))
RANK, ALPHA, SCALE = 3, 6.0, 2.0


def saved(folder, family):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    return str(folder)


def policy_of(folder, dtype="fp32", checkpointing=False):
    model = ModelConfig(path=str(folder), dtype=dtype, gradient_checkpointing=checkpointing)
    return load_policy(model, temperature=1.0, key="actor.model.path")


def critic_of(folder):
    return load_critic(ModelConfig(path=str(folder), dtype="fp32"), zero_head=True)


def adapt(model, targets=None, seed=0, rank=RANK, trained=True):
    """Adds adapters to the model; with ``trained``, B is nonzero."""
    add_adapters(model, rank=rank, alpha=2.0 * rank, targets=targets, seed=seed, key="actor.lora")
    if trained:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in adapter_parameters(model):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


# -- adapted and trained parameters ----------------------------------------------------------------


@EVERY
def test_all_linear_layers_but_the_head_are_adapted_and_nothing_else_is_trained(tmp_path, family):
    folder = saved(tmp_path, family)
    lm = adapt(policy_of(folder).lm, trained=False)
    trained = {name for name, parameter in lm.named_parameters() if parameter.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == LINEAR[family]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    adapted = [name for name, _ in plain.named_modules() if name.rpartition(".")[2] in LINEAR[family]]
    assert trained == {f"{name}.lora_{matrix}.default.weight" for name in adapted for matrix in "AB"}
    assert [id(p) for p in adapter_parameters(lm)] == [
        id(p) for name, p in lm.named_parameters() if name in trained
    ]


@EVERY
def test_an_adapted_model_starts_as_its_base(tmp_path, family):
    folder = saved(tmp_path, family)
    lm = adapt(policy_of(folder).lm, trained=False)
    assert torch.equal(logits(lm), logits(policy_of(folder).lm))
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            assert (parameter == 0).all() == (".lora_B." in name) and parameter.isfinite().all(), name


def test_adapters_have_the_dtype_of_the_base_and_come_from_the_seed_alone(tmp_path):
    folder = saved(tmp_path, "llama")
    found = []
    for seed, drawn_before in ((5, 0), (5, 3), (6, 0)):
        lm = policy_of(folder, dtype="bf16").lm
        torch.manual_seed(0)
        torch.rand(drawn_before)
        state = torch.get_rng_state()
        found.append(adapter_parameters(adapt(lm, seed=seed, trained=False)))
        assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in found[0]} == {torch.bfloat16}
    same = [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found]
    assert same == [True, True, False]


def test_named_layers_alone(tmp_path):
    lm = adapt(policy_of(saved(tmp_path, "llama")).lm, targets=["v_proj", "layers.1.mlp.up_proj"])
    assert sorted({name.split(".lora_")[0] for name, p in lm.named_parameters() if p.requires_grad}) == [
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.v_proj",
    ]


@pytest.mark.parametrize(
    "targets, said",
    [
        (["nope"], r"actor.lora.targets=\[nope\]: no linear layer is called nope; "),
        (
            ["q_proj", "lm_head", "mlp"],
            r"actor.lora.targets=\[q_proj,lm_head,mlp\]: no linear layer is called lm_head or mlp; ",
        ),
        ([], r"actor.lora.targets=\[\]: names no layer; "),
    ],
)
def test_targets_that_match_nothing_are_one_line_with_the_candidates(tmp_path, targets, said):
    lm = policy_of(saved(tmp_path, "llama")).lm
    with pytest.raises(
        UserError,
        match=said + "this model has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj ",
    ) as error:
        adapt(lm, targets=targets)
    assert "\n" not in str(error.value)


def test_a_critic_trains_its_head_whole(tmp_path):
    critic = critic_of(saved(tmp_path, "llama"))
    adapt(critic.model)
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert "model.score.weight" in trained and all(
        ".lora_" in name for name in trained - {"model.score.weight"}
    )
    assert all(critic.model.score.weight is not parameter for parameter in adapter_parameters(critic))


# -- forward and backward --------------------------------------------------------------------------


def test_one_layer_by_hand():
    """For W = [[1, 2]], A = [[1, 1]], B = [[3]] and alpha / rank = 2, W + 2 B A is [[7, 8]]."""

    class Tiny(nn.Module):
        name_or_path = "here"

        def __init__(self):
            super().__init__()
            self.only = nn.Linear(2, 1, bias=False)
            self.only.weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))

        @property
        def base_model(self):
            return self

        def can_generate(self):
            return False

        def get_output_embeddings(self):
            return None

        def forward(self, x):
            return self.only(x)

    model = Tiny()
    add_adapters(model, rank=1, alpha=2.0, targets=None, seed=0, key="actor.lora")
    down, up = adapter_parameters(model)
    down.data, up.data = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0]])
    assert model(torch.eye(2)).flatten().tolist() == [7.0, 8.0]
    (weight,) = plain_weights(model)
    assert weight.merged(torch.device("cpu")).tolist() == [[7.0, 8.0]] and weight.base.tolist() == [
        [1.0, 2.0]
    ]
    model(torch.tensor([[1.0, 10.0]])).sum().backward()
    # y = (W + 2 B A) x: dy/dB = 2 A x = 2 x 11, dy/dA = 2 B x = 6 (1, 10)
    assert up.grad.tolist() == [[22.0]] and down.grad.tolist() == [[6.0, 60.0]] and weight.base.grad is None


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_gradients_follow_from_those_of_a_plain_model(tmp_path, family, checkpointing):
    """With W' = W + s B A in a plain model, dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'.

    GPT-2 stores its matrices transposed.
    """
    folder = saved(tmp_path, family)
    adapted, plain = adapt(policy_of(folder, checkpointing=checkpointing).lm).train(), policy_of(folder).lm
    runs, block = [], (adapted.model.layers if family == "qwen2" else adapted.transformer.h)[0]
    next(block.children()).register_forward_hook(lambda *_: runs.append(1))
    layers = {name: layer for name, layer in adapted.named_modules() if hasattr(layer, "lora_A")}
    turned = (lambda x: x.T) if family == "gpt2" else (lambda x: x)
    matrices = {
        name: (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        for name, layer in layers.items()
    }
    with torch.no_grad():
        for name, (down, up) in matrices.items():
            plain.get_submodule(name).weight.add_(turned(SCALE * up @ down))
    for model in (adapted, plain):
        model(input_ids=IDS).logits.log_softmax(-1)[..., 5].sum().backward()
    assert len(runs) == 1 + checkpointing
    for name, (down, up) in matrices.items():
        whole = turned(plain.get_submodule(name).weight.grad)
        for found, expected in ((up.grad, SCALE * whole @ down.T), (down.grad, SCALE * up.T @ whole)):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
    assert all(
        parameter.grad is None for name, parameter in adapted.named_parameters() if ".lora_" not in name
    )


@EVERY
def test_without_adapters_it_is_the_base_to_the_bit_and_afterwards_the_adapted_model(tmp_path, family):
    folder = saved(tmp_path, family)
    lm = adapt(policy_of(folder).lm)
    before, trained = logits(lm), [p.requires_grad for p in lm.parameters()]
    with without_adapters(lm):
        base = logits(lm)
    assert torch.equal(base, logits(policy_of(folder).lm))
    assert (before - base).abs().max() > 0.1
    with pytest.raises(ZeroDivisionError), without_adapters(lm):
        raise ZeroDivisionError
    assert torch.equal(logits(lm), before) and [p.requires_grad for p in lm.parameters()] == trained


# -- merged copies: the weight copy and saved models -----------------------------------------------


@EVERY
@pytest.mark.parametrize("adapted", [True, False])
def test_a_twin_filled_with_plain_weights_is_the_same_model_without_adapters(tmp_path, family, adapted):
    lm = policy_of(saved(tmp_path, family)).lm
    lm = adapt(lm) if adapted else lm
    kept = {name: parameter.clone() for name, parameter in lm.named_parameters()}
    twin = unsharded_twin(lm, torch.device("cpu"))
    assert len(list(plain_modules(lm))) == len(list(twin.modules())) and not any(
        ".lora_" in name for name, _ in twin.named_parameters()
    )
    for weight, hollow in zip(plain_weights(lm), twin.parameters(), strict=True):
        hollow.data = weight.merged(hollow.device)
    torch.testing.assert_close(logits(twin), logits(lm), rtol=0, atol=1e-4)
    assert all(torch.equal(parameter, kept[name]) for name, parameter in lm.named_parameters())
    pointers = {p.data_ptr() for p in lm.parameters()}
    assert not any(p.data_ptr() in pointers for p in twin.parameters())


def test_merging_is_computed_in_fp32(tmp_path):
    """A sum slightly above 1 + 2^-8 rounds up in bf16 only if B A is computed in fp32.

    1 + 2^-8 is half-way between 1 and 1 + 2^-7 and rounds to 1 in bf16. A slightly larger sum rounds to
    1 + 2^-7, but the excess is lost if B A is computed in bf16.
    """
    lm = adapt(policy_of(saved(tmp_path, "llama"), dtype="bf16").lm, targets=["v_proj"], rank=2)
    weight = next(weight for weight in plain_weights(lm) if weight.layer is not None)
    down, up = weight.parameters[1:]
    for parameter, value in ((weight.base, 1.0), (down, 0.0), (up, 1.0)):
        parameter.data.fill_(value)
    down.data[:, 0] = torch.tensor([2.0**-9, 2.0**-18])  # times alpha / rank = 2
    merged = weight.merged(torch.device("cpu"))
    assert merged.dtype == torch.bfloat16 and merged[0, 0] == 1 + 2**-7 and merged[0, 1] == 1


@EVERY
def test_the_saved_model_and_the_saved_adapter_are_both_the_trained_one(tmp_path, family):
    folder = saved(tmp_path / "base", family)
    policy = policy_of(folder)
    adapt(policy.lm)
    state = {name: tensor.clone() for name, tensor in policy.lm.state_dict().items()}
    expected = logits(policy.lm)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()  # saving must write the given tensors, not the parameters
    policy.save_adapter(tmp_path / "adapter", state)
    policy.save(tmp_path / "model", state)

    merged, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == (
        family in ("qwen2", "gpt2", "opt")
    )
    on_base = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapter"
    )
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(on_base), expected, rtol=0, atol=1e-6)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"], about["task_type"]) == (
        RANK,
        ALPHA,
        folder,
        "CAUSAL_LM",
    )


def test_a_base_weight_is_freed_once_it_is_merged(tmp_path):
    """An export holds at most one copy of the model's weights besides the module."""
    policy = policy_of(saved(tmp_path, "llama"))
    adapt(policy.lm)
    state = {name: weight.clone() for name, weight in policy.lm.state_dict().items()}
    bases = [weakref.ref(weight) for name, weight in state.items() if name.endswith("base_layer.weight")]
    plain = merged_state(policy.lm, state)
    assert bases and not any(base() is not None for base in bases)
    assert plain.keys() == AutoModelForCausalLM.from_config(FAMILIES["llama"]()).state_dict().keys()


def test_the_module_saves_itself_merged_too_and_a_plain_one_saves_no_adapter(tmp_path):
    policy = policy_of(saved(tmp_path / "base", "llama"))
    policy.save_adapter(tmp_path / "none", policy.lm.state_dict())
    assert not (tmp_path / "none").exists()
    adapt(policy.lm)
    policy.save(tmp_path / "model")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(policy.lm), rtol=0, atol=1e-4
    )


def test_a_saved_critic_is_a_plain_sequence_classifier(tmp_path):
    critic = critic_of(saved(tmp_path / "base", "llama"))
    adapt(critic.model)
    critic.model.score.weight.data.normal_(generator=torch.Generator().manual_seed(4))
    critic.save(
        tmp_path / "critic", {name: tensor.clone() for name, tensor in critic.model.state_dict().items()}
    )
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    plain.config.pad_token_id = 0
    with torch.no_grad():
        values = critic(IDS, torch.ones_like(IDS, dtype=torch.bool))
        torch.testing.assert_close(plain.eval()(input_ids=IDS).logits[:, 0], values, rtol=0, atol=1e-4)
    assert values.abs().max() > 0.1


def test_decoding_with_adapters_is_decoding_with_the_merged_model(tmp_path):
    policy = policy_of(saved(tmp_path / "base", "qwen2"))
    adapt(policy.lm)
    policy.save(tmp_path / "model")
    how = dict(
        limits=torch.full((3,), 6),
        sampling=SamplingParams(6, 0, 1.0, 1.0, 1, stop_token_ids=(), stop_strings=()),
        tokenizer=SimpleNamespace(pad_id=0),
    )
    found = [
        generate(lm.eval(), IDS, torch.ones_like(IDS, dtype=torch.bool), **how)
        for lm in (policy.lm, policy_of(tmp_path / "model").lm)
    ]
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-4)
    with without_adapters(policy.lm):
        assert not torch.equal(
            generate(policy.lm, IDS, torch.ones_like(IDS, dtype=torch.bool), **how)[0], found[0][0]
        )
