"""Tests that every backend stops within a few tokens of a stop request.

A stopped backend returns tensors of the usual shapes and can be used again.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.rollout.static import StaticGenerator

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


class Stop:
    """A stop condition that becomes true at the n-th call."""

    def __init__(self, after):
        self.looks, self.after = 0, after

    def __call__(self):
        self.looks += 1
        return self.looks > self.after


@pytest.fixture
def texts(tokenizer):
    return tokenizer([chr(97 + i) for i in range(V - 3)])


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("kind", [StaticGenerator, HFGenerator])
@pytest.mark.parametrize("token_budget", [10_000, 300])  # all rows at once, one after the other
def test_it_ends_within_a_few_tokens(prompts, sampling, texts, kind, after, token_budget):
    lm, rows = model(), prompts([3, 4, 5], [4], [5, 6])
    forwards = forwards_of(lm)
    rollout = kind(lambda: lm, tokenizer=texts, token_budget=token_budget, should_stop=Stop(after))(
        rows, sampling(LONG)
    )
    assert len(forwards) <= after + 2 and len(rollout) == 3
    assert rollout.logprobs.isfinite().all() and rollout.metadata == rows.metadata


def on_two_ranks(make, stops, batches, sampling):
    """Runs two ranks as threads that agree by a barrier; returns the rows and forwards of each.

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

        generator = make(lms[index], all_reduce_max=agree, should_stop=stops[index])
        return len(generator(batches[index], sampling(LONG))), len(forwards)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_ranks_in_step_leave_together_though_one_alone_has_heard_of_it(prompts, sampling, texts):
    def make(lm, **how):
        return StaticGenerator(lambda: lm, tokenizer=texts, token_budget=2 * (LONG + 3), **how)

    batches = [prompts([3, 4, 5], limits=[LONG]), prompts([3], [4, 4], [5], limits=[2, 3, LONG])]
    (rows, forwards), (other_rows, other_forwards) = on_two_ranks(
        make, [Stop(7), lambda: False], batches, sampling
    )
    assert (rows, other_rows) == (1, 3) and forwards == other_forwards <= 9


def test_in_step_transformers_generate_is_not_called_for_more_chunks_on_one_rank_than_on_the_other(
    prompts, sampling, texts, monkeypatch
):
    def generate(
        lm, ids, mask, limits, sampling, **_
    ):  # its own collective for the tokens of a chunk is not one of threads
        lm(input_ids=ids)
        return torch.zeros(len(ids), 1, dtype=torch.long), torch.zeros(len(ids), 1)

    monkeypatch.setattr("ppo_ds.rollout.hf.generate", generate)
    batches = [prompts([3, 4, 5], [3], [4]), prompts([3], [4, 4], [5])]  # a chunk each

    def make(lm, **how):
        return HFGenerator(lambda: lm, tokenizer=texts, token_budget=1, **how)

    assert on_two_ranks(make, [Stop(2), lambda: False], batches, sampling) == [(3, 2), (3, 2)]
