"""Tests the parts of perf/* and mem/* that all stages share."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.models.lora import add_adapters
from ppo_ds.models.policy import Policy
from ppo_ds.run import performance
from ppo_ds.run.performance import Capacity, update_cost


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peak_memory_is_the_maximum_over_ranks(on_ranks, monkeypatch, ranks):
    taken = itertools.count(1)  # a different measurement on each rank
    monkeypatch.setattr(performance, "host_peak", lambda: 2**20 * next(taken))
    assert [seen["mem/host_rss_gb"] for seen in on_ranks(ranks, performance.memory)] == [float(ranks)] * ranks


def test_frozen_weights_need_no_gradient_flops():
    def cost(rank):
        lm = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=11,
            )
        )
        if rank:
            add_adapters(lm, rank=rank, alpha=2.0, targets=None, seed=0, key="lora")
        policy = Policy(lm, 1.0)
        return update_cost(type("Engine", (), {"module": policy})(), policy.lm).forwards

    assert (cost(0), cost(1)) == (3, 2)


def test_the_machine_is_measured_on_all_ranks(on_ranks, monkeypatch):
    monkeypatch.setattr(performance, "gemm_flops_per_s", lambda *args, **kwargs: 3.0)
    monkeypatch.setattr(performance, "bytes_per_s", lambda *args, **kwargs: 5.0)
    assert (
        on_ranks(2, lambda world: performance.measured_capacity(world, torch.float32))
        == [Capacity(6.0, 10.0)] * 2
    )
