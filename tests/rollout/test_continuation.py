"""Tests how the backends static and vllm continue and interrupt responses (rollout.partial)."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.rollout.base import Continuation
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.static import StaticGenerator
from ppo_ds.rollout.vllm import VLLMGenerator
from tests.support import fake_vllm

V = 40
PROMPTS, LIMITS = ([3, 4, 5], [6], [7, 8], [9, 10, 11, 12], [13, 14]), [9, 12, 4, 12, 7]


@pytest.fixture(params=["static", "one slot", "lockstep", "vllm"])
def backend(request, tokenizer, monkeypatch):
    """Returns the model, and a function that generates with it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, head_dim=32, initializer_range=0.5, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    lm, texts = LlamaForCausalLM(config).eval(), tokenizer([chr(97 + i) for i in range(V - 3)])
    if request.param == "vllm":
        fake_vllm.install(monkeypatch)
        more = dict(settings=VLLMConfig(), kv_cache=2**20, longest=64, temperature=1.0)
        made = VLLMGenerator(lambda: lm, tokenizer=texts, token_budget=100, **more)

        def generate(*arguments):
            with made.loaded(iter(lm.named_parameters())):
                return made(*arguments)

        return lm, generate
    budget = 16 if request.param == "one slot" else 1000
    lockstep = int if request.param == "lockstep" else None
    return lm, StaticGenerator(lambda: lm, tokenizer=texts, token_budget=budget, lockstep_max=lockstep)


def tokens_of(rollout):
    return [row[mask].tolist() for row, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)]


def never(ended):
    return False


@pytest.mark.parametrize("begun", [[0] * 5, [3, 1, 0, 11, 6]])
def test_continued_responses_are_those_of_one_phase(backend, prompts, sampling, begun):
    lm, generate = backend
    batch, greedy = prompts(*PROMPTS, limits=LIMITS), sampling(12, top_k=1)
    whole = generate(batch, greedy)
    # the first row ends with its fifth token, but not before its fifth token
    options = replace(greedy, stop_token_ids=(tokens_of(whole)[0][4],), min_new_tokens=5)
    whole = generate(batch, options)
    assert int(whole.response_lengths[0]) >= 5
    rows = tokens_of(whole)
    counts = [min(n, len(row) - 1) for n, row in zip(begun, rows, strict=True)]
    started = [row[:n] for n, row in zip(counts, rows, strict=True)]
    found = generate(batch, options, Continuation(started, never))
    assert tokens_of(found) == rows and torch.equal(found.finished, whole.finished)
    new = torch.arange(whole.response_width) >= torch.tensor(counts)[:, None]
    assert torch.allclose(found.logprobs, whole.logprobs * new, atol=1e-5)


def test_a_stop_string_may_begin_in_an_earlier_phase(backend, prompts, sampling):
    _, generate = backend
    batch, greedy = prompts(PROMPTS[0]), sampling(12, top_k=1)
    (row,) = tokens_of(generate(batch, greedy))
    string = "".join(chr(97 + token - 3) for token in row[3:5])
    found = generate(batch, replace(greedy, stop_strings=(string,)), Continuation([row[:4]], never))
    assert tokens_of(found) == [row[:5]] and found.finished.tolist() == [True]


def test_the_others_are_interrupted_once_enough_responses_have_ended(backend, prompts, sampling):
    lm, generate = backend
    batch, greedy = prompts(*PROMPTS, limits=LIMITS), sampling(12, top_k=1)
    whole, asked = tokens_of(generate(batch, greedy)), []

    def enough(ended):
        asked.append(set(ended))
        return len(ended) >= 2

    found = generate(batch, greedy, Continuation([()] * 5, enough))
    lengths = found.response_lengths.tolist()
    assert tokens_of(found) == [row[:n] for row, n in zip(whole, lengths, strict=True)]
    ended = {i for i, n in enumerate(lengths) if n == LIMITS[i]}
    assert ended == asked[-1] and len(ended) == 2
    # limits of 4 and 7 tokens are the first to be reached if all rows are decoded together, and the first two
    # rows end if they are decoded one after the other, before any other has started
    assert (ended, lengths) in [({2, 4}, [7, 7, 4, 7, 7]), ({0, 1}, [9, 12, 0, 0, 0])]


def test_nothing_is_generated_if_there_are_enough_responses_already(backend, prompts, sampling):
    _, generate = backend
    batch = prompts(*PROMPTS[:2])
    found = generate(batch, sampling(5), Continuation([(), (7, 8)], lambda ended: True))
    assert tokens_of(found) == [[], [7, 8]] and not found.finished.any()
