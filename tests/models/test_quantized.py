"""Tests NF4: its numbers against the table of the paper, a model against one with dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from ppo_ds.compute.sizes import NF4_BITS
from ppo_ds.config.sections.models import LoraConfig, ModelConfig
from ppo_ds.models.lora import adapter_parameters, add_adapters, checkpoint_names, plain_weights
from ppo_ds.models.policy import Policy, load_policy
from ppo_ds.models.quantized import is_quantized, plain_weight
from ppo_ds.models.size import planned_shape, shape_of
from ppo_ds.models.value import load_critic, load_reward_model

pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")

V = 40
IDS = torch.randint(4, V, (3, 7), generator=torch.Generator().manual_seed(1))
# Dettmers et al. 2023, appendix E
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path / "reward")
    return path


def section(folder: Path, **changes: str) -> ModelConfig:
    return ModelConfig(**{"path": str(folder), "dtype": "fp32", "quantization": "nf4"} | changes)


def policy_of(folder: Path, **changes: str) -> Policy:
    return load_policy(section(folder, **changes), temperature=1.0, key="actor.model.path")


def adapt(policy: Policy) -> Policy:
    add_adapters(policy.lm, rank=4, alpha=8.0, targets=None, seed=0, key="actor.lora")
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for matrix in adapter_parameters(policy.lm):
            matrix.add_(0.1 * torch.randn(matrix.shape, generator=draw).to(matrix.dtype))
    return policy


def dequantized(policy: Policy, folder: Path) -> Policy:
    """Returns a model without quantization that has the dequantized weights of ``policy``."""
    plain = policy_of(folder, quantization="none")
    for parameter, quantized in zip(plain.lm.parameters(), plain_weights(policy.lm), strict=True):
        parameter.data = plain_weight(quantized.base).detach().to(parameter.dtype)
    return plain


def outputs(policy: Policy) -> Tensor:
    return policy(IDS, torch.ones_like(IDS), 4).logprobs


def test_weights_are_rounded_to_the_table_times_the_largest_of_64(folder: Path) -> None:
    """The scale itself is rounded to 8 bits, by at most 2 %."""
    quantized, original = policy_of(folder), AutoModelForCausalLM.from_pretrained(folder)
    layers = {name: module for name, module in original.named_modules() if isinstance(module, nn.Linear)}
    assert len(layers) == 15
    for name, layer in layers.items():
        weight = quantized.lm.get_submodule(name).weight
        assert is_quantized(weight) == (name != "lm_head" and layer.in_features == 64)
        blocks = layer.weight.detach().view(-1, 64)
        scale = blocks.abs().amax(1, keepdim=True)
        if not is_quantized(weight):
            assert torch.equal(weight, layer.weight)
            continue
        codes = (blocks / scale)[..., None].sub(torch.tensor(NF4)).abs().argmin(-1)
        expected = torch.tensor(NF4)[codes] * scale
        found = plain_weight(weight).view(-1, 64)
        assert ((found - expected).abs() <= 0.02 * scale).all()
        ratios = (found / expected)[codes != 7].view(-1)
        assert 0 < (ratios - 1).abs().max() < 0.02


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_forward_gradients_and_decoding_are_those_of_dequantized_weights(folder: Path, dtype: str) -> None:
    quantized = adapt(policy_of(folder, dtype=dtype))
    plain = adapt(dequantized(quantized, folder)) if dtype == "fp32" else None
    assert {matrix.dtype for matrix in adapter_parameters(quantized.lm)} == {quantized.lm.dtype}
    codes = {name: p.detach().clone() for name, p in quantized.lm.named_parameters() if is_quantized(p)}
    for train in (True, False):
        found = outputs(quantized.train(train))
        if plain is not None:
            torch.testing.assert_close(found, outputs(plain), atol=1e-5, rtol=0)
            found.sum().backward()
            outputs(plain).sum().backward()
            for a, b in zip(*(adapter_parameters(policy.lm) for policy in (quantized, plain)), strict=True):
                torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    with torch.no_grad():  # a forward on the CPU must not repack the codes
        outputs(quantized.eval())
    now = dict(quantized.lm.named_parameters())
    assert len(codes) == 12 and all(torch.equal(now[name], value) for name, value in codes.items())


def test_state_dicts_and_names_are_those_of_the_plain_model(folder: Path) -> None:
    quantized, plain = policy_of(folder), policy_of(folder, quantization="none")
    state, expected = quantized.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert all(state[name].shape == tensor.shape for name, tensor in expected.items())
    assert all(state[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert checkpoint_names(adapt(quantized).lm) == checkpoint_names(plain.lm)


def test_a_saved_model_has_merged_weights_and_no_quantization(folder: Path, tmp_path: Path) -> None:
    policy = adapt(policy_of(folder))
    policy.save(tmp_path / "model")
    policy.save_adapter(tmp_path / "adapter", policy.lm.state_dict())
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    logits = merged(input_ids=IDS).logits[:, 2:-1].log_softmax(-1)
    expected = logits.gather(2, IDS[:, 3:, None])[..., 0]
    torch.testing.assert_close(outputs(policy), expected, atol=1e-5, rtol=0)


def test_critics_and_reward_models_keep_their_head(folder: Path) -> None:
    critic = load_critic(section(folder), zero_head=True)
    reward = load_reward_model(section(folder / "reward"))
    original = AutoModelForSequenceClassification.from_pretrained(folder / "reward")
    assert torch.equal(reward.model.score.weight, original.score.weight)
    assert not is_quantized(critic.model.score.weight)
    for model in (critic, reward):
        assert sum(is_quantized(p) for p in model.parameters()) == 12
    scores = reward(IDS, torch.ones_like(IDS))
    states = original.base_model(IDS).last_hidden_state[:, -1]
    assert 0 < (scores - original.score(states)[:, 0]).abs().max() < 2.0


def test_memory_by_hand(folder: Path) -> None:
    """Each layer has 64 x 64 for q and o, 32 x 64 for k and v, and three matrices of 64 x 96.

    The last one of them has 96 inputs, which is no multiple of 64, and is not quantized.
    """
    lora = LoraConfig(rank=4)
    planned = planned_shape(
        section(folder), classifier=False, trained=True, lora=lora, key="actor.model.path"
    )
    assert planned == shape_of(adapt(policy_of(folder)).lm)
    quantized = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 2 * 64 * 96)
    adapters = 2 * 4 * (2 * 128 + 2 * 96 + 3 * 160)
    rest = 2 * V * 64 + 5 * 64 + 2 * 64 * 96
    assert planned.quantized == quantized and planned.trained == adapters
    assert planned.parameters == quantized + adapters + rest
    assert NF4_BITS == 4.126953125
    assert planned.weight_bytes(2) == 2 * (adapters + rest) + quantized * 4.126953125 / 8
