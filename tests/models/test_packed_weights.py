"""Tests linear layers with packed weights against float64, and when weights are packed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_ds.compute import matmul
from ppo_ds.models import linear
from ppo_ds.models.linear import FEWEST_PRODUCTS, Linear, install_linears, packed_weights
from ppo_ds.models.lm_head import LMHead, install_head

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    monkeypatch.setattr(matmul, "_library", "onednn")


def llama(**more):
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    lm = AutoModelForCausalLM.from_config(
        LlamaConfig(num_key_value_heads=2, intermediate_size=64, **sizes, **more)
    )
    install_linears(lm)
    install_head(lm)
    return lm.eval()


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, Linear)]


def are_packed(model):
    return {layer.packed_weight is not None for layer in layers_of(model)}


@pytest.mark.parametrize("rows", [(32,), (3,), (1,), (7, 1), (5, 40)])
@pytest.mark.parametrize("biased", [True, False])
def test_values_equal_those_in_float64(rows, biased):
    torch.manual_seed(0)
    layer = Linear(48, 80, bias=biased)
    x = torch.randn(*rows, 48)
    with packed_weights(layer, FEWEST_PRODUCTS), torch.no_grad():
        assert layer.packed_weight is not None
        found = layer(x)
    bias = layer.bias.double() if biased else None
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), bias)
    assert found.dtype == torch.float32 and found.shape == (*rows, 80)
    torch.testing.assert_close(found.double(), exact.detach(), rtol=0, atol=1e-5)


def test_an_input_of_another_dtype_gives_the_error_of_torch():
    layer = Linear(48, 80)
    with packed_weights(layer, FEWEST_PRODUCTS), torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.randn(3, 48).bfloat16())


def test_values_in_bf16_equal_those_of_torch():
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN computes no products in bf16 on this processor")
    torch.manual_seed(0)
    layer, x = Linear(48, 80).bfloat16(), torch.randn(9, 48).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        with packed_weights(layer, FEWEST_PRODUCTS):
            assert layer.packed_weight is not None
            found = layer(x)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def test_weights_are_packed_only_inside_the_block_and_again_in_the_next():
    lm, ids = llama(), torch.arange(5)[None]
    with torch.no_grad():
        for _ in range(2):
            with packed_weights(lm, FEWEST_PRODUCTS):
                assert are_packed(lm) == {True}
                found = lm(input_ids=ids).logits
            assert are_packed(lm) == {False}
            torch.testing.assert_close(found, lm(input_ids=ids).logits, rtol=0, atol=1e-5)
            for parameter in lm.parameters():  # an update between two rollouts
                parameter.mul_(1.3)


def test_weights_are_released_after_an_exception():
    lm = llama()
    with pytest.raises(RuntimeError, match="stop"), packed_weights(lm, FEWEST_PRODUCTS):
        raise RuntimeError("stop")
    assert are_packed(lm) == {False}


def test_gradients_are_refused_inside_the_block():
    lm = llama()
    with packed_weights(lm, FEWEST_PRODUCTS), pytest.raises(AssertionError):
        lm(input_ids=torch.arange(5)[None])


def test_weights_stay_as_they_are_if_packing_does_not_pay(monkeypatch):
    lm = llama()
    size = sum(layer.weight.nbytes for layer in layers_of(lm))
    assert any(isinstance(layer, LMHead) for layer in layers_of(lm))
    for products, most, library, packed in (
        (FEWEST_PRODUCTS, size, "onednn", True),
        (FEWEST_PRODUCTS - 1, size, "onednn", False),
        (FEWEST_PRODUCTS, size - 1, "onednn", False),
        (FEWEST_PRODUCTS, size, "torch", False),
    ):
        monkeypatch.setattr(linear, "MOST_PACKED", most)
        monkeypatch.setattr(matmul, "_library", library)
        with packed_weights(lm, products):
            assert are_packed(lm) == {packed}
