"""Tests multi-turn responses with every decode backend, and with rows that are divided among ranks."""

import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.config.registry import import_target
from ppo_ds.ppo.minibatches import concatenate
from ppo_ds.rollout.keys import BACKENDS, VLLMConfig
from tests.environments.conftest import END, Scripted, sampling_of
from tests.ppo.conftest import ThreadWorld
from tests.support import fake_vllm
from tests.support.threads import run_threads

NAMES = [name for name in BACKENDS if name != "auto"]


class Echo:
    """Gives the length and the first character of each turn as feedback, and is done after three turns."""

    def reset(self, row):
        self.turns = 0

    def step(self, answer):
        self.turns += 1
        return f"{len(answer) % 10}{answer[:1]}", 0.5 * self.turns, self.turns == 3


@pytest.fixture
def lm(tokenizer):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def decode(generator_of, lm, tokenizer, monkeypatch):
    """Returns a function that generates multi-turn responses with a decode backend."""
    fake_vllm.install(monkeypatch)

    def run(name, prompts, sampling, environment=Echo, **changes):
        entry, make = BACKENDS[name], import_target(BACKENDS[name].generator)
        arguments = {"lm": lambda: lm, "tokenizer": tokenizer, "token_budget": 400}
        arguments |= {"lockstep_max": None, "should_stop": lambda: False}
        if not entry.own_weights:
            return generator_of(environment, make(**arguments), **changes)(prompts, sampling)
        with torch.random.fork_rng():
            backend = make(**arguments, settings=VLLMConfig(), kv_cache=2**20, longest=256, temperature=1.0)
        with backend.loaded(iter(lm.named_parameters())):
            return generator_of(environment, backend, **changes)(prompts, sampling)

    return run


# every second id ends a turn, so that most turns are short
STOPS = tuple(range(END, 19, 2))


@pytest.mark.parametrize("name", NAMES)
def test_the_log_probs_are_those_of_one_forward_over_the_whole_response(decode, lm, prompts_of, name):
    """No token is encoded again: the ids, in one forward, give the log-probs with which they were drawn."""
    torch.manual_seed(1)
    prompts = prompts_of("1+2=", "12+345=", "9=", "+")
    rollout = decode(name, prompts, sampling_of(30, stop_token_ids=STOPS))
    positions = (rollout.attention_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = lm(rollout.ids, attention_mask=rollout.attention_mask, position_ids=positions).logits
    table = logits[:, rollout.prompt_width - 1 : -1].log_softmax(-1)
    expected = table.gather(2, rollout.response_ids[:, :, None])[:, :, 0]
    mask = rollout.response_mask
    assert torch.allclose(rollout.logprobs[mask], expected[mask], atol=1e-5)
    assert not rollout.logprobs[~mask].any() and rollout.feedback_mask.any()
    assert "done" in rollout.episode_ends


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hf"])
def test_all_backends_give_the_same_greedy_responses(decode, prompts_of, name):
    prompts = prompts_of("1+2=", "12+345=", "9=", "+")
    sampling = sampling_of(30, stop_token_ids=STOPS).as_greedy()
    expected, found = (decode(backend, prompts, sampling) for backend in ("hf", name))
    for column in ("ids", "attention_mask", "response_mask", "feedback_mask", "turn_rewards", "finished"):
        assert torch.equal(getattr(found, column), getattr(expected, column)), column
    assert found.episode_ends == expected.episode_ends and expected.feedback_mask.sum() > 4


SCRIPT = {
    "1=": "a",
    "1=a<eos>1a": "bb",
    "1=a<eos>1abb<eos>2b": "ccc",
    "2=": "a~",
    "3=": "b",
    "3=b<eos>1b": "c~",
}


def test_two_ranks_give_the_rows_of_one_rank(tokenizer, prompts_of, generator_of):
    """The rows of rank 1 end after the first turn, so it decodes fillers in the other two."""
    whole = prompts_of("1=", "3=", "2=", "2=")
    expected = generator_of(Echo, SCRIPT)(whole, sampling_of(14))
    barrier, shares = threading.Barrier(2), [None, None]
    calls = {}

    def work(rank):
        world = ThreadWorld(rank, 2, barrier, shares)
        backend = Scripted(tokenizer, SCRIPT)
        generate = generator_of(Echo, backend, world=world)
        rollout = generate(whole.select(torch.arange(4).chunk(2)[rank]), sampling_of(14))
        calls[rank] = backend.calls
        return rollout

    found = concatenate(run_threads(2, work, barrier))
    for name, column in expected.tensors().items():
        assert torch.equal(found.tensors()[name], column), name
    assert found.episode_ends == expected.episode_ends == ("done", "length", "length", "length")
    assert [len(calls[rank]) for rank in (0, 1)] == [3, 3] and calls[1][1:] == [["2="]] * 2
