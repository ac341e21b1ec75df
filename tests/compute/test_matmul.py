"""Tests products of fp32 matrices by oneDNN against float64, and when they are left to torch."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ppo_ds.compute import matmul
from ppo_ds.models.linear import Linear, install_linears

AMD = (
    "processor : 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name : AMD EPYC\n"
    "flags\t\t: fpu avx2 avx512f avx512bw\n"
)
INTEL = AMD.replace("AuthenticAMD", "GenuineIntel")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Chooses oneDNN and records its products."""
    monkeypatch.setattr(matmul, "_library", "onednn")
    spy = mock.Mock(wraps=matmul._onednn)
    monkeypatch.setattr(matmul, "_onednn", spy)
    return spy


def rows_and_weight(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    *rows, inputs, outputs = shape
    x = torch.randn(*rows, inputs, dtype=dtype, requires_grad=True)
    weight = torch.randn(outputs, inputs, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(outputs, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (AMD, "onednn"),
        (AMD.replace("26", "25"), "torch"),  # Zen 4
        (INTEL, "torch"),
        (AMD.replace(" avx512f avx512bw", ""), "torch"),
        ("processor : 0\nFeatures : fp asimd bf16\n", "torch"),  # ARM
        ("", "torch"),
    ],
)
def test_onednn_is_chosen_on_amd_since_zen_5(tmp_path: Path, cpuinfo: str, expected: str) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert matmul.faster_library(tmp_path / "cpuinfo") == expected


def test_torch_is_chosen_without_cpuinfo_or_without_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert matmul.faster_library(tmp_path / "missing") == "torch"
    (tmp_path / "cpuinfo").write_text(AMD)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert matmul.faster_library(tmp_path / "cpuinfo") == "torch"


def test_use_changes_the_library_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_library", "torch")
    matmul.use("onednn")
    assert matmul.library() == "onednn"
    matmul.use("auto")
    assert matmul.library() == matmul.faster_library()


@pytest.mark.parametrize("rows", [(300,), (4, 75), (2, 3, 50)])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_equal_those_in_float64(
    products: mock.Mock, rows: tuple[int, ...], biased: bool
) -> None:
    x, weight, bias = rows_and_weight(*rows, 96, 128)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    out = matmul.linear(x, weight, bias if biased else None)
    expected = F.linear(exact[0], exact[1], exact[2] if biased else None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)

    slope = torch.randn_like(out)
    out.backward(slope)
    expected.backward(slope.double())
    for leaf, reference in zip((x, weight, bias) if biased else (x, weight), exact, strict=False):
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=1e-5, atol=1e-4)
    assert products.call_count == 3  # one of the forward, two of the backward


def test_only_needed_gradients_are_computed(products: mock.Mock) -> None:
    x, weight, _ = rows_and_weight(300, 96, 128)
    matmul.linear(x.detach(), weight).sum().backward()  # the first layer, or frozen inputs
    assert products.call_count == 2 and weight.grad is not None
    products.reset_mock()
    matmul.linear(x, weight.detach()).sum().backward()  # LoRA: a frozen weight
    assert products.call_count == 2 and x.grad is not None


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 8, 8), torch.float32), ((300, 96, 128), torch.bfloat16), ((300, 96, 128), torch.float64)],
)
def test_small_products_and_other_dtypes_are_left_to_torch(
    products: mock.Mock, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, bias = rows_and_weight(*shape, dtype=dtype)
    assert torch.equal(matmul.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(matmul.mm(x.detach(), weight.detach().t()), x @ weight.t())
    assert not products.called


def test_vectors_and_autocast_are_left_to_torch(products: mock.Mock) -> None:
    x, weight, bias = rows_and_weight(2048, 1024)
    out = matmul.linear(x, weight, bias)
    out.sum().backward()
    assert torch.equal(out, F.linear(x, weight, bias)) and x.grad is not None
    x, weight, bias = rows_and_weight(300, 96, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(x, weight, bias).dtype == torch.bfloat16
    assert not products.called


def test_mm_writes_into_a_slice(products: mock.Mock) -> None:
    x, weight, _ = (leaf.detach() for leaf in rows_and_weight(300, 96, 128))
    whole = torch.full((500, 128), -1.0)
    matmul.mm(x, weight.t(), out=whole[100:400])
    torch.testing.assert_close(whole[100:400], x @ weight.t(), rtol=1e-5, atol=1e-4)
    assert whole[:100].eq(-1).all() and whole[400:].eq(-1).all() and products.call_count == 1


def test_linear_layers_of_a_model_keep_parameters_hooks_and_names(products: mock.Mock) -> None:
    class Scaled(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), Scaled(128, 2))
    names, weight, calls = list(model.state_dict()), model[0].weight, []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    x = torch.randn(300, 96)
    expected = model(x)
    install_linears(model)
    found = model(x)
    assert type(model[0]) is Linear and type(model[2]) is Scaled
    assert list(model.state_dict()) == names and model[0].weight is weight
    assert len(calls) == 2 and products.call_count == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)

    other = copy.deepcopy(model)
    other[0].weight.data.zero_()
    assert model(x).ne(other(x)).any()  # a copy computes with its own weights
