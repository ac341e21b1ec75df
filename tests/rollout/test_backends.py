"""Tests of the contract of decode backends, which every backend passes.

The expected responses come from a model whose next token the test determines, or from a loop of plain
forwards. The expected log-probs come from plain forwards. ``plain``, the example of a backend, is tested too.
The number of forwards of ranks in lockstep is tested in the files of the single backends.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.config.registry import import_target
from ppo_ds.rollout.keys import BACKENDS, VLLMConfig
from tests.support import fake_vllm

V, EOS, UNKNOWN = 40, 1, 2
LIMITS = [9, 12, 4, 12, 1, 7]
EXAMPLE = SimpleNamespace(
    generator="tests.rollout.plain_backend.PlainGenerator", own_weights=False, refusal=None
)
ENTRIES = {name: backend for name, backend in BACKENDS.items() if name != "auto"} | {"plain": EXAMPLE}
pytestmark = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """Replaces vLLM, which has an environment of its own, by the fake of the ordinary tests."""
    fake_vllm.install(monkeypatch)


@pytest.fixture
def decode(tokenizer):
    """Returns a function that decodes ``prompts`` with a backend; tokens from 3 on are a, b, c, ...

    ``budget`` is the number of tokens that are decoded at a time.
    """

    def run(entry, lm, prompts, sampling, budget=10_000, should_stop=lambda: False):
        texts = tokenizer([chr(97 + i) for i in range(V - 3)])
        arguments = {"lm": lambda: lm, "tokenizer": texts, "token_budget": budget}
        arguments |= {"lockstep_max": None, "should_stop": should_stop}
        if not entry.own_weights:
            return import_target(entry.generator)(**arguments)(prompts, sampling)
        with torch.random.fork_rng():  # the start of an engine seeds all generators
            generator = import_target(entry.generator)(
                **arguments,
                settings=VLLMConfig(),
                kv_cache=2**20,
                longest=64,
                temperature=sampling.temperature,
            )
        with generator.loaded(iter(lm.named_parameters())):
            return generator(prompts, sampling)

    return run


@pytest.fixture
def lm():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def batch(prompts):
    """Makes six prompts of different lengths with their own limits; the second equals the third."""
    rows = [[5], [6, 7, 8, 9], [6, 7, 8, 9], [30, 3, 17], [11, 12], [20, 21, 22]]
    return prompts(*rows, limits=LIMITS)


def responses_of(rollout):
    rows = zip(rollout.response_ids, rollout.response_mask, strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def greedy_by_hand(lm, prompt, limit, stop_ids):
    """Returns the greedy response to one prompt with one plain forward per token."""
    ids = prompt.tolist()
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(lm(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("budget", [10_000, 40, 1])  # all rows at once, a few at a time, one at a time
def test_greedy_responses_are_those_of_plain_forwards(entry, decode, lm, batch, sampling, budget):
    stop_ids = (5, 6, 7)
    rollout = decode(entry, lm, batch, sampling(12, top_k=1, stop_token_ids=stop_ids), budget)
    wanted = [
        greedy_by_hand(lm, ids[mask], limit, stop_ids)
        for ids, mask, limit in zip(batch.ids, batch.mask, LIMITS, strict=True)
    ]
    assert responses_of(rollout) == wanted
    assert rollout.finished.tolist() == [response[-1] in stop_ids for response in wanted]
    assert len(set(map(len, wanted))) > 2 and 0 < rollout.finished.sum() < len(batch)


def test_logprobs_of_drawn_tokens_are_those_of_the_whole_distribution_at_the_temperature(
    entry, decode, lm, batch, sampling
):
    # a config with both options is refused for vLLM (config/checks/vllm.py)
    both, separate = [(0.7, 5)], [(0.7, 0), (1.0, 5)]
    for temperature, top_k in separate if entry.own_weights else both:
        torch.manual_seed(1)
        options = sampling(12, temperature=temperature, top_k=top_k, stop_token_ids=(5, 6, 7))
        rollout = decode(entry, lm, batch, options)
        for i, response in enumerate(responses_of(rollout)):
            row = rollout.ids[i][rollout.attention_mask[i]]
            with torch.no_grad():
                table = (lm(input_ids=row[None]).logits[0].double() / temperature).log_softmax(-1)
            expected = table[-len(response) - 1 : -1].gather(1, row[-len(response) :, None])[:, 0]
            assert (rollout.logprobs[i, : len(response)] - expected).abs().max() < 1e-5


def test_torchs_random_state_determines_the_draws(entry, decode, lm, batch, sampling):
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(responses_of(decode(entry, lm, batch, sampling(12))))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][1][:4] != drawn[0][2]  # two responses to the same prompt


def test_a_rollout_is_on_the_cpu_and_empty_outside_its_masks(entry, decode, lm, batch, prompts, sampling):
    rows = prompts(
        *[row[mask].tolist() for row, mask in zip(batch.ids, batch.mask, strict=True)], limits=LIMITS
    )
    torch.manual_seed(1)
    rollout = decode(entry, lm, rows, sampling(50, stop_token_ids=(5, 6, 7, 8)))
    assert all(column.device.type == "cpu" for column in rollout.tensors().values())
    assert rollout.logprobs.dtype == torch.float32 and rollout.limits.tolist() == LIMITS
    assert rollout.response_width == rollout.response_lengths.max() <= max(LIMITS)
    assert rollout.prompt_width == 4 and torch.equal(rollout.ids[:, :4], rows.ids)
    assert not rollout.ids[~rollout.attention_mask].any()  # 0 is the pad id
    assert not rollout.logprobs[~rollout.response_mask].any()
    assert torch.equal(rollout.response_mask, rollout.response_attention)
    assert rollout.metadata == rows.metadata


@pytest.mark.parametrize("budget", [10_000, 12])
def test_stop_tokens_stop_strings_and_limits(entry, decode, successor, prompts, sampling, budget):
    """The model generates c, d, e, f, ...; after f come g and an end token, and after j an unknown token.

    A stop string may span several tokens, must begin in the response, and may be a special token. A stop at
    the last position within the limit makes the response finished.
    """
    lm = successor({5: 6, 6: 7, 7: 8, 8: 9, 9: EOS, 12: UNKNOWN}, V)
    rows = prompts([5], [4, 5], [8], [8], [8], [12], [6], limits=[8, 1, 8, 2, 1, 8, 2])
    wanted = [[6, 7], [6], [9, EOS], [9, EOS], [9], [UNKNOWN], [7, 8]]
    finished = [True, False, True, True, False, True, False]
    rollout = decode(
        entry, lm, rows, sampling(8, stop_token_ids=(EOS,), stop_strings=("de", "<unk>", "cd")), budget
    )
    assert responses_of(rollout) == wanted and rollout.finished.tolist() == finished


def test_decoding_ends_with_the_last_row_and_padding_is_trimmed(entry, decode, successor, prompts, sampling):
    """The prompts are padded to three tokens because of the fourth row, which is not decoded."""
    most = 50 if entry is EXAMPLE else 4  # the example always runs max_new_tokens forwards
    lm, forwards = successor({3: 4, 4: EOS}, V), []
    lm.register_forward_pre_hook(lambda *_: forwards.append(1))
    rows = prompts([3], [4], [5], [6, 7, 8], limits=[50, 50, 3, 50]).select(torch.arange(3))
    rollout = decode(entry, lm, rows, sampling(50, stop_token_ids=(EOS,)))
    assert (rollout.prompt_width, rollout.response_width) == (1, 3)
    assert responses_of(rollout) == [[4, EOS], [EOS], [5, 5, 5]] and len(forwards) <= most


class Stop:
    """A stop condition that becomes true after ``after`` calls."""

    def __init__(self, after):
        self.calls, self.after = 0, after

    def __call__(self):
        self.calls += 1
        return self.calls > self.after


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("budget", [10_000, 300])  # all rows at once, one after the other
def test_after_a_stop_request_it_ends_within_a_few_tokens(
    entry, decode, lm, prompts, sampling, after, budget
):
    """A stopped call returns tensors of the usual shapes, and the backend can decode again."""
    forwards, rows = [], prompts([3, 4, 5], [4], [5, 6])
    lm.register_forward_pre_hook(lambda *_: forwards.append(1))
    rollout = decode(entry, lm, rows, sampling(200), budget, should_stop=Stop(after))
    assert len(forwards) <= after + 2 and len(rollout) == 3
    assert rollout.logprobs.isfinite().all() and rollout.metadata == rows.metadata
    assert decode(entry, lm, rows, sampling(2), budget).response_lengths.tolist() == [2, 2, 2]


def test_a_plain_causal_lm_is_not_refused(entry, lm):
    if entry.refusal is not None:
        assert import_target(entry.refusal)(lm, 16) is None
