"""Tests that ranks in lockstep run the same forwards, and stop together if one receives a stop request.

Stopping a single rank is tested in test_backends.py.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.rollout.static import StaticGenerator
from tests.rollout.test_backends import Stop

V, LONG = 40, 200
CONFIG = LlamaConfig(
    vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32,
    max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).eval()


def forwards_of(lm):
    count = []
    lm.register_forward_pre_hook(lambda *_: count.append(1))
    return count


@pytest.fixture
def texts(tokenizer):
    return tokenizer([chr(97 + i) for i in range(V - 3)])


def on_two_ranks(make, stops, batches, sampling):
    """Runs two ranks as threads that communicate at a barrier; returns (rollout, forwards) of each rank.

    ``make`` takes a model and the arguments of a generator, and returns a generator.
    """
    barrier, said, lms = Barrier(2, timeout=300), {}, [model(), model()]

    def rank(index):
        forwards = forwards_of(lms[index])

        def agree(number):
            said[index] = int(number)
            barrier.wait()
            largest = max(said.values())
            barrier.wait()
            return largest

        generator = make(lms[index], lockstep_max=agree, should_stop=stops[index])
        return generator(batches[index], sampling), len(forwards)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_ranks_in_step_leave_together_though_one_alone_has_heard_of_it(prompts, sampling, texts):
    def make(lm, **how):
        return StaticGenerator(lambda: lm, tokenizer=texts, token_budget=2 * (LONG + 3), **how)

    batches = [prompts([3, 4, 5], limits=[LONG]), prompts([3], [4, 4], [5], limits=[2, 3, LONG])]
    (one, forwards), (other, other_forwards) = on_two_ranks(
        make, [Stop(7), lambda: False], batches, sampling(LONG)
    )
    assert (len(one), len(other)) == (1, 3) and forwards == other_forwards <= 9


def test_ranks_in_step_run_the_same_forwards(prompts, sampling, texts):
    """Two ranks with different work give the same responses as alone, and run the same forwards."""

    def make(lm, **how):
        return StaticGenerator(lambda: lm, tokenizer=texts, token_budget=12, check_every=2, **how)

    batches = [prompts([3, 4, 5], limits=[11]), prompts([3], [4, 4], [5], [6, 7, 8], limits=[2, 3, 1, 2])]
    found = on_two_ranks(make, [lambda: False] * 2, batches, sampling(11, top_k=1))
    alone = HFGenerator(model, tokenizer=texts, token_budget=10_000)
    for batch, (rollout, _) in zip(batches, found, strict=True):
        wanted = alone(batch, sampling(11, top_k=1))
        assert torch.equal(rollout.ids, wanted.ids) and torch.equal(
            rollout.response_mask, wanted.response_mask
        )
    assert found[0][1] == found[1][1]


def test_in_step_transformers_generate_is_not_called_for_more_chunks_on_one_rank_than_on_the_other(
    prompts, sampling, texts, monkeypatch
):
    def generate(
        lm, ids, mask, limits, sampling, **_
    ):  # a stand-in, because the collective of generate() does not work between threads
        lm(input_ids=ids)
        return torch.zeros(len(ids), 1, dtype=torch.long), torch.zeros(len(ids), 1)

    monkeypatch.setattr("ppo_ds.rollout.hf.generate", generate)
    batches = [prompts([3, 4, 5], [3], [4]), prompts([3], [4, 4], [5])]  # each prompt is a chunk

    def make(lm, **how):
        return HFGenerator(lambda: lm, tokenizer=texts, token_budget=1, **how)

    found = on_two_ranks(make, [Stop(2), lambda: False], batches, sampling(LONG))
    assert [(len(rollout), forwards) for rollout, forwards in found] == [(3, 2), (3, 2)]
