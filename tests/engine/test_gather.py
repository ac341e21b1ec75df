"""Tests the chunks in which sharded parameters are gathered, with a stand-in for GatheredParameters."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.gather import chunked
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import LRSchedule
from ppo_ds.models.policy import Policy, unsharded_twin
from tests.support.models import SIZES

LIMIT = 600  # elements per chunk, so that the tiny model has several chunks


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ([], []),
        ([3], [[3]]),
        ([4, 6], [[4, 6]]),  # the last item reaches the limit
        ([4, 6, 1], [[4, 6], [1]]),
        ([9, 5, 2, 20, 1, 1], [[9, 5], [2, 20], [1, 1]]),
        ([10, 10, 10], [[10], [10], [10]]),
    ],
)
def test_a_chunk_ends_with_the_item_that_reaches_the_limit(sizes, chunks):
    assert list(chunked(sizes, lambda size: size, 10)) == chunks


@pytest.fixture
def gathered(monkeypatch):
    """Lists the parameters of each gather."""
    chunks = []

    @contextmanager
    def gather(parameters, enabled=True):
        chunks.append(list(parameters))
        yield

    monkeypatch.setattr("deepspeed.zero.GatheredParameters", gather)
    return chunks


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return Policy(LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=20)), temperature=1.0)


def check_chunks(chunks, module):
    """Checks that several chunks hold each parameter once; only a chunk's last parameter may reach LIMIT."""
    parameters = list(module.parameters())
    assert sorted(map(id, sum(chunks, []))) == sorted(map(id, parameters))
    assert len(chunks) > 2
    assert all(sum(p.numel() for p in chunk[:-1]) < LIMIT for chunk in chunks)


def equal(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_consolidated_weights_are_whole_and_gathered_in_chunks(gathered, policy):
    world = SimpleNamespace(is_main=True)
    model = SimpleNamespace(module=policy, world=world, zero_stage=3, restore_weights=lambda: None)
    assert equal(consolidated(model, LIMIT), policy.state_dict())
    check_chunks(gathered, policy)


def test_the_inference_copy_is_whole_and_filled_in_chunks(gathered, policy, monkeypatch):
    engine = SimpleNamespace(module=policy, zero_optimization_stage=lambda: 3)
    monkeypatch.setattr("deepspeed.initialize", lambda **_: (engine,))
    actor = HybridActor(
        policy,
        make_inference_copy=unsharded_twin,
        timer=lambda _: nullcontext(),
        gather_elements=LIMIT,
        world=SimpleNamespace(device=torch.device("cpu"), quiet=nullcontext),
        deepspeed_config={"zero_optimization": {"stage": 3}},
        schedule=LRSchedule(1e-2, "constant", 0.0, 0.0, 10),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )
    with actor.generation_mode():
        assert actor.lm is not policy.lm and equal(actor.lm.state_dict(), policy.lm.state_dict())
    check_chunks(gathered, policy.lm)
