"""Decoding with transformers' continuous batching: the same answers as one row at a time, with their log-probs, whatever the cache holds."""

import re
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
)

from ppo_ds.models import packed_attention as packed
from ppo_ds.rollout import paging
from ppo_ds.rollout.paged import PagedGenerator, unsupported
from ppo_ds.rollout.paging import can_page, paged_config

V, PAD, EOS = 40, 0, 1
SMALL = dict(
    vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, initializer_range=0.5,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
MODELS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=V,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "llama": lambda: LlamaConfig(**SMALL, num_key_value_heads=1),
    "sliding": lambda: Gemma3TextConfig(
        **SMALL,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
LENGTHS = [1, 6, 3, 6, 2, 4]
STOPS = (5, 6, 7, 8, 9)


def model(family, attention="sdpa"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[family](), attn_implementation=attention).eval()


@pytest.fixture
def batch(prompts):
    torch.manual_seed(1)
    return prompts(*[torch.randint(2, V, (n,)).tolist() for n in LENGTHS])


@pytest.fixture
def decoded(tokenizer, sampling):
    """Prompts -> a Rollout; the tokenizer is of V single characters."""

    def run(lm, prompts, n, token_budget=10_000, **knobs):
        texts = tokenizer([chr(97 + i) for i in range(V - 3)])
        return PagedGenerator(lambda: lm, tokenizer=texts, token_budget=token_budget)(
            prompts, sampling(n, **knobs)
        )

    return run


def answers_of(rollout):
    return [
        ids[mask].tolist()
        for ids, mask in zip(rollout.ids[:, rollout.prompt_width :], rollout.response_mask, strict=True)
    ]


def table(lm, prompt, answer, temperature=1.0):
    """[n,V] float64: one row by itself in one plain forward."""
    with torch.no_grad():
        logits = lm(input_ids=torch.cat([prompt, torch.tensor(answer)])[None]).logits[0].double()
    return torch.log_softmax(logits / temperature, -1)[-len(answer) - 1 : -1]


def prompt_of(batch, i):
    return batch.ids[i][batch.mask[i]]


def test_the_attention_that_packs_rows_is_in_place():
    """It is what training runs with, and it must let pages through."""
    assert AttentionInterface()["sdpa"] is packed.attention


@pytest.mark.parametrize(
    ("family", "attention"), [("gpt2", "sdpa"), ("llama", "sdpa"), ("llama", "eager"), ("sliding", "sdpa")]
)
def test_greedy_tokens_are_those_of_a_loop_by_hand(batch, decoded, family, attention):
    lm = model(family, attention)
    rollout = decoded(
        lm, replace(batch, limits=torch.tensor([6, 1, 9, 3, 6, 6])), 6, top_k=1, temperature=0.3
    )
    for i, (answer, limit) in enumerate(zip(answers_of(rollout), [6, 1, 6, 3, 6, 6], strict=True)):
        row = prompt_of(batch, i)
        for _ in range(limit):
            with torch.no_grad():
                row = torch.cat([row, lm(input_ids=row[None]).logits[0, -1].argmax()[None]])
        assert answer == row[-limit:].tolist()
        expected = table(lm, prompt_of(batch, i), answer, 0.3).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (
            rollout.logprobs[i, :limit] - expected
        ).abs().max() < 1e-4  # at the temperature, though nothing was drawn
    assert not rollout.finished.any() and lm.config._attn_implementation == attention


@pytest.mark.parametrize("token_budget", [1, 10_000])
def test_drawn_answers_end_at_stops_and_have_their_logprobs(prompts, decoded, token_budget):
    """Also where the cache holds one row's page and twelve rows wait for it."""
    lm = model("llama")
    torch.manual_seed(2)
    rows = prompts(*[torch.randint(10, V, (1 + i % 5,)).tolist() for i in range(12)])
    rollout = decoded(lm, rows, 12, token_budget, temperature=0.8, stop_token_ids=STOPS)
    for i, answer in enumerate(answers_of(rollout)):
        assert not set(answer[:-1]) & set(STOPS) and (len(answer) == 12 or answer[-1] in STOPS)
        assert bool(rollout.finished[i]) == (answer[-1] in STOPS)
        expected = table(lm, prompt_of(rows, i), answer, 0.8).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (rollout.logprobs[i, : len(answer)] - expected).abs().max() < 1e-4


def test_draws_follow_the_distribution(chain, prompts, decoded):
    """1,000 first tokens against softmax(logits / 0.7): chi-square with 7 degrees of freedom, 99.9% quantile 24.3."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    torch.manual_seed(5)
    rollout = decoded(chain(logits.repeat(8, 1)), prompts(*[[3]] * 1000), 1, temperature=0.7)
    counts = torch.bincount(rollout.ids[:, -1], minlength=8).double()
    expected = 1000 * torch.softmax(logits.double() / 0.7, 0)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


def test_the_same_random_state_gives_the_same_answers_and_moves_on(batch, decoded):
    """A resumed run restores the state of torch's own generator, and nothing else decides what is drawn."""
    lm, draws = model("llama"), []
    torch.manual_seed(6)
    start = torch.get_rng_state()
    draws += [answers_of(decoded(lm, batch, 8)), answers_of(decoded(lm, batch, 8))]
    torch.set_rng_state(start)
    draws += [answers_of(decoded(lm, batch, 8)), answers_of(decoded(lm, batch, 8))]
    assert draws[:2] == draws[2:] and draws[0] != draws[1]


def test_greedy_leaves_the_random_state_alone(batch, decoded):
    lm = model("llama")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    decoded(lm, batch, 3, top_k=1)
    assert torch.equal(before, torch.get_rng_state())


def test_no_thread_is_left(batch, decoded):
    before = threading.enumerate()
    decoded(model("llama"), batch, 3)
    assert threading.enumerate() == before


def test_an_error_in_the_thread_is_raised_here_and_ends_it(batch, decoded):
    lm, before = model("llama"), threading.enumerate()

    def broken(*_):
        raise FloatingPointError("of the model's own")

    lm.lm_head.register_forward_hook(broken)
    with pytest.raises(FloatingPointError, match="of the model's own") as caught:
        decoded(lm, batch, 3)
    assert "memory.rollout_tokens" in caught.value.__notes__[0] and threading.enumerate() == before
    assert lm.config._attn_implementation == "sdpa"


def test_a_request_that_fails_alone_is_not_passed_over(batch, decoded, monkeypatch):
    class Output:
        request_id, error = "0", "too long for the cache"

    class Manager:
        background_thread_status = type("Status", (), {"fatal_error": None})
        calls = []

        def __getattr__(self, name):
            return lambda *args, **more: (
                self.calls.append(name) or (Output() if name == "get_result" else True)
            )

    lm = model("llama")
    monkeypatch.setattr(lm, "init_continuous_batching", lambda *args: Manager(), raising=False)
    with pytest.raises(RuntimeError, match="ended with 0 of 6 answers: too long for the cache"):
        decoded(lm, batch, 3)
    assert Manager.calls[-2:] == ["stop", "destroy"]


def test_the_cache_holds_the_budget_but_one_row_at_least_and_no_more_than_all():
    """Pages of 256 tokens. Rows of 10 + 90, 200 + 100 and 1 + 1 tokens fill 1, 2 and 1."""
    lengths, limits = [10, 200, 1], [90, 100, 1]
    pages = [paged_config(lengths, limits, budget, 0).num_blocks for budget in (1, 512, 767, 768, 10**6)]
    assert pages == [2, 2, 2, 3, 4]
    assert [paged_config(lengths, limits, budget, 0).safety_margin for budget in (768, 10**6)] == [None, 0.0]
    config = paged_config(lengths, limits, 512, 11)
    assert config.return_logprobs and config.seed == 11 and not config.auto_switch_to_flash


@pytest.mark.parametrize(
    ("knobs", "key"),
    [
        (dict(stop_strings=("\n",)), r"sampling.stop=\['\\n'\].*sampling.stop_token_ids"),
        (dict(min_new_tokens=2), "sampling.min_new_tokens=2"),
        (dict(top_k=5), "sampling.top_k=5"),
        (dict(top_p=0.9), "sampling.top_p=0.9"),
    ],
)
def test_what_it_cannot_do_is_said(sampling, knobs, key):
    assert re.search(key, unsupported(sampling(3, **knobs)))


def test_what_it_can_do(sampling):
    assert unsupported(sampling(3, temperature=0.5, stop_token_ids=(1, 2))) is None
    assert unsupported(sampling(3, top_p=0.9).as_greedy()) is None  # greedy is greedy


def test_models_that_it_cannot_decode(monkeypatch):
    assert can_page(model("llama")) is None and can_page(model("sliding")) is None
    assert "Linear has no continuous batching" in can_page(nn.Linear(1, 1))
    mamba = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    assert "MambaForCausalLM" in can_page(mamba)
    flex = model("llama")
    flex.config._attn_implementation = "flex_attention"
    assert "actor.model.attn_implementation" in can_page(flex) and "flex_attention" in can_page(flex)
    linear = model("sliding")
    linear.config.layer_types = ["linear_attention", "full_attention"]
    assert "linear_attention" in can_page(linear)
    monkeypatch.setattr(paging, "fields", lambda _: ())
    assert "too old" in can_page(model("llama"))
