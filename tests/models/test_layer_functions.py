"""Tests that replaced functions in layers give the same numbers, gradients included, as transformers' own."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ppo_ds.compute.fused import rms_norm, rotary
from ppo_ds.models.layer_functions import attention_forward, norm_forward, use_fused_functions
from ppo_ds.models.lora import adapter_parameters, add_adapters
from tests.support.models import SIZES

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
USUAL = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "mixtral", "phi3")


def model_of(family, dtype=torch.float32, **options):
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **(sizes | options))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # norms are initialized with ones or zeros
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def results(model):
    """Returns the logits and all gradients of a forward and backward over two padded rows."""
    ids = torch.arange(14).view(2, 7) * 5 % 32
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits.float().log_softmax(-1)[:, 1:5, 3].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def replaced(model):
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", USUAL)
def test_fused_functions_are_bit_identical(family, dtype):
    model = model_of(family, dtype)
    fused = copy.deepcopy(model)
    use_fused_functions(fused)
    names = replaced(fused)
    norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    assert sum("RMSNorm" in name for name in names) == norms >= 5
    assert sum("Attention" in name for name in names) == (0 if family == "qwen3" else 2)
    expected, found = results(model), results(fused)
    assert len(expected) == len(found) > 10
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert list(model.state_dict()) == list(fused.state_dict())
    with torch.no_grad():
        ids = torch.arange(14).view(2, 7)
        assert torch.equal(model(ids).logits, fused(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_functions_with_gradient_checkpointing_and_adapters(dtype):
    model = model_of("qwen3", dtype)
    add_adapters(model, rank=2, alpha=4, targets=None, seed=0, key="lora")
    with torch.no_grad():
        for matrix in adapter_parameters(model):
            matrix.add_(0.1)
    fused = copy.deepcopy(model)
    use_fused_functions(fused)
    fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, found = results(model.train()), results(fused.train())
    assert len(expected) == len(found) > 10
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class OtherRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.001


class ArgumentRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states * gate)


@pytest.mark.parametrize("kind", [OtherRMSNorm, ArgumentRMSNorm, nn.RMSNorm, nn.LayerNorm])
def test_other_norms_are_left_alone(kind):
    assert norm_forward(LlamaRMSNorm) is not None
    assert norm_forward(kind) is None


def test_other_rotary_embeddings_are_left_alone():
    # Cohere and GLM rotate neighbouring coordinates
    assert attention_forward(modeling_llama.LlamaAttention) is not None
    assert attention_forward(modeling_cohere.CohereAttention) is None
    assert attention_forward(modeling_glm.GlmAttention) is None
    assert attention_forward(modeling_gpt2.GPT2Attention) is None


def test_partial_rotary_embeddings_are_computed_by_the_family():
    model = model_of("phi3", partial_rotary_factor=0.5, rope_parameters=HALF, eos_token_id=1)
    fused = copy.deepcopy(model)
    use_fused_functions(fused)
    assert "Phi3Attention" in replaced(fused)
    assert all(torch.equal(a, b) for a, b in zip(results(model), results(fused), strict=True))


def test_mixed_dtypes_use_the_original_norm():
    norm = LlamaRMSNorm(8)
    x = torch.linspace(-1, 2, 16, dtype=torch.bfloat16).view(2, 8)
    expected = norm(x)
    norm.forward = MethodType(norm_forward(LlamaRMSNorm), norm)
    assert norm(x).dtype == torch.float32
    assert torch.equal(norm(x), expected)


@pytest.mark.filterwarnings("ignore:Input #")  # gradcheck recommends fp64, but a norm computes in fp32
def test_gradients_by_finite_differences():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 1, 3, 8, requires_grad=True)
    cos, sin = torch.randn(2, 1, 3, 8)
    options = dict(eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0)
    assert gradcheck(lambda x, weight: rms_norm(x, weight, 0.1), (x, weight), **options)
    assert gradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k), **options)
