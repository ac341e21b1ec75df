"""Tests decoding in slots against transformers, with any number of slots; counts the forwards."""

import gc
import itertools
import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from ppo_ds.compute import matmul
from ppo_ds.models.linear import install_linears
from ppo_ds.rollout import continuous_batch, static
from ppo_ds.rollout.cache import SlotCache
from ppo_ds.rollout.decoding import refusal
from ppo_ds.rollout.graphs import Graphs
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.rollout.static import StaticGenerator
from tests.rollout.test_backends import responses_of

V, PAD, EOS = 40, 0, 1
PLAIN = dict(vocab_size=V, bos_token_id=None, eos_token_id=None, pad_token_id=None)
SIZES = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=32,
    initializer_range=0.5,
    **PLAIN,
)
MODELS = {
    "gpt2": lambda **more: GPT2Config(n_embd=16, n_layer=2, n_head=2, initializer_range=0.5, **PLAIN, **more),
    "llama": lambda **more: LlamaConfig(num_key_value_heads=2, **SIZES, **more),
    "qwen2": lambda **more: Qwen2Config(num_key_value_heads=2, **SIZES, **more),
    "gpt_neox": lambda **more: GPTNeoXConfig(**SIZES, **more),
    "opt": lambda **more: OPTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=32,
        word_embed_proj_dim=16,
        init_std=0.5,
        **PLAIN,
        **more,
    ),
    "mixtral": lambda **more: MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SIZES, **more),
}
EVERY = pytest.mark.parametrize("family", MODELS)
LENGTHS, LIMITS = [1, 6, 6, 6, 3, 2, 4], [9, 12, 4, 12, 1, 7, 12]


def model(family, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[family](**more)).eval()


@pytest.fixture
def batch(prompts):
    """Makes seven rows with their own limits; the second to the fourth have the same prompt."""
    torch.manual_seed(1)
    rows = [torch.randint(2, V, (n,)).tolist() for n in LENGTHS]
    return prompts(*rows[:2], rows[1], rows[1], *rows[4:], limits=LIMITS)


@pytest.fixture
def texts(tokenizer):
    return tokenizer([chr(97 + i) for i in range(V - 3)])


def forwards_of(lm):
    """Returns a list that collects the shapes of the input ids of all later forwards."""
    shapes = []
    lm.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def check_logprobs(lm, rollout, temperature, tolerance=1e-5):
    """Compares the log-probs to one plain forward per row, without padding or cache."""
    for i, n in enumerate(rollout.response_mask.sum(1).tolist()):
        row = rollout.ids[i][rollout.attention_mask[i]]
        with torch.no_grad():
            table = torch.log_softmax(lm(input_ids=row[None]).logits[0].double() / temperature, -1)
        expected = table[-n - 1 : -1].gather(1, row[-n:, None])[:, 0]
        assert (rollout.logprobs[i, :n] - expected).abs().max() < tolerance, i


def same(one, other):
    for name in ("ids", "attention_mask", "response_mask", "finished", "limits"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


# -- responses -------------------------------------------------------------------------------------


@EVERY
def test_greedy_responses_are_those_of_generate(batch, family, sampling, texts):
    """The responses are the same with slots for all rows, two slots and one slot.

    They are also the same whether ended rows are detected after every step or every fourth step.
    """
    lm = model(family)
    assert refusal(lm, longest=18) is None
    greedy = sampling(12, top_k=1, temperature=0.7, stop_token_ids=(5, 6, 7))
    wanted = HFGenerator(lambda: lm, tokenizer=texts, token_budget=10_000)(batch, greedy)
    assert len(set(wanted.response_mask.sum(1).tolist())) > 2
    for token_budget, check_every in ((10_000, 1), (36, 1), (60, 4), (1, 1)):
        found = StaticGenerator(
            lambda: lm, tokenizer=texts, token_budget=token_budget, check_every=check_every
        )(batch, greedy)
        same(found, wanted)
        torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masks_are_taken_as_given_by_both_attentions(batch, sampling, texts, attention):
    lm = model("llama", attn_implementation=attention)
    torch.manual_seed(3)
    check_logprobs(
        lm, StaticGenerator(lambda: lm, tokenizer=texts, token_budget=60)(batch, sampling(12)), 1.0
    )
    assert lm.config._attn_implementation == attention


def test_bf16(batch, sampling, texts):
    lm = model("llama").bfloat16()
    assert refusal(lm, longest=18) is None
    torch.manual_seed(3)
    rollout = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=60)(batch, sampling(12))
    assert rollout.logprobs.dtype == torch.float32
    check_logprobs(lm, rollout, 1.0, tolerance=0.3)


def test_drawn_responses_depend_on_no_schedule(batch, sampling, texts):
    """Random numbers are drawn per row and position, so the number of slots does not change a response.

    Another seed gives other responses.
    """
    lm, drawn = model("llama"), []
    for seed, token_budget, check_every in ((5, 10_000, 1), (5, 1, 1), (5, 60, 3), (6, 10_000, 1)):
        torch.manual_seed(seed)
        drawn.append(
            StaticGenerator(lambda: lm, tokenizer=texts, token_budget=token_budget, check_every=check_every)(
                batch, sampling(12)
            )
        )
    same(drawn[0], drawn[1])
    same(drawn[0], drawn[2])
    assert responses_of(drawn[0]) != responses_of(drawn[3])
    second, third = (responses_of(drawn[0])[i] for i in (1, 3))
    assert second != third  # two responses to the same prompt


def test_responses_follow_the_joint_distribution(sampling, prompts, texts):
    """4,000 responses of two tokens follow the joint distribution of all 36 pairs from plain forwards.

    The vocabulary has six tokens. Chi-square with 35 degrees of freedom is below 66.6 in 99.9% of cases;
    sampling at temperature 1 instead of 0.7 would give far more.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | dict(vocab_size=6, num_key_value_heads=2))
    lm = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        lm.lm_head.weight.mul_(0.5)  # gives every token a noticeable probability
        table = torch.zeros(6, 6, dtype=torch.float64)
        for first in range(6):
            logits = lm(input_ids=torch.tensor([[3, 4, first]])).logits[0].double() / 0.7
            table[first] = logits[1].softmax(-1)[first] * logits[2].softmax(-1)
    torch.manual_seed(9)
    rows = prompts(*[[3, 4]] * 4000)
    rollout = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=4 * 1500)(
        rows, sampling(2, temperature=0.7)
    )
    responses = rollout.ids[:, -2:]
    expected = 4000 * table.flatten()
    counts = torch.bincount(responses[:, 0] * 6 + responses[:, 1], minlength=36).double()
    often = expected >= 5
    chi = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert often.sum() > 10 and chi < 66.6
    assert counts[~often].sum() < expected[~often].sum() + 5 * math.sqrt(float(expected[~often].sum())) + 5


# -- stops and limits ------------------------------------------------------------------------------


def test_a_stop_string_long_before_a_check_ends_decoding(successor, prompts, sampling, tokenizer):
    """The tokens are b c d e e e ...: at the first check 14 tokens follow the stop string "c"."""
    lm = successor({3: 4, 4: 5, 5: 6, 6: 7, 7: 7}, 10)
    shapes = forwards_of(lm)
    generator = StaticGenerator(
        lambda: lm, tokenizer=tokenizer("abcdefg"), token_budget=10_000, check_every=16
    )
    assert responses_of(generator(prompts([3]), sampling(50, stop_strings=("c",)))) == [[4, 5]]
    # the prefill and 16 steps until the check; without the check it would be 1 + 50
    assert len(shapes) == 1 + 16


def test_a_least_number_of_tokens_yields_to_a_limit(successor, prompts, sampling, tokenizer):
    generator = StaticGenerator(
        lambda: successor({3: EOS}, 10), tokenizer=tokenizer("abcdefg"), token_budget=10_000
    )
    torch.manual_seed(0)
    rollout = generator(
        prompts([3], [3], limits=[2, 9]), sampling(9, min_new_tokens=4, stop_token_ids=(EOS,))
    )
    lengths = rollout.response_mask.sum(1).tolist()
    assert lengths[0] == 2 and lengths[1] > 4 and not rollout.finished[0]
    assert EOS not in responses_of(rollout)[1][:4]


def test_rows_are_split_into_bands_only_if_they_do_not_fit_together():
    """Four rows of 8 tokens fit into 32. With 31, rows longer than 2, a quarter of 8, form a band."""
    totals = torch.tensor([8, 2, 1, 3])
    assert [band.tolist() for band in static.length_bands(totals, 32)] == [[0, 1, 2, 3]]
    assert [band.tolist() for band in static.length_bands(totals, 31)] == [[0, 3], [1, 2]]


# -- slots -----------------------------------------------------------------------------------------


def test_a_prompt_is_read_once_for_all_its_responses(successor, prompts, sampling, tokenizer):
    """One forward prefills each distinct prompt once for all its responses.

    The two prompts have 4 and 3 tokens and three responses each. The prefill reads two rows of three tokens:
    all tokens but the last of each prompt, padded.
    """
    lm = successor({}, 10)
    shapes = forwards_of(lm)
    generator = StaticGenerator(lambda: lm, tokenizer=tokenizer("abcdefg"), token_budget=10_000)
    rollout = generator(
        prompts([3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 6], [7, 8, 9], [7, 8, 9], [7, 8, 9]), sampling(2)
    )
    assert responses_of(rollout) == [[6, 6]] * 3 + [[9, 9]] * 3
    assert shapes == [(2, 3), (6, 1), (6, 1)]


def test_freed_slots_are_taken_and_the_batch_shrinks(successor, prompts, sampling, tokenizer):
    """Two slots serve the limits 5, 1, 2 and 1.

    The first row keeps its slot for five steps while the others pass through the second slot.
    """
    lm = successor({token: token for token in range(10)}, 10)
    shapes = forwards_of(lm)
    generator = StaticGenerator(lambda: lm, tokenizer=tokenizer("abcdefg"), token_budget=2 * 7)
    rollout = generator(prompts([3, 3], [4, 4], [5, 5], [6, 6], limits=[5, 1, 2, 1]), sampling(9))
    assert responses_of(rollout) == [[3] * 5, [4], [5, 5], [6]]
    one, two, read_one, read_two = (1, 1), (2, 1), (1, 1), (2, 1)
    assert shapes == [read_two, two, read_one, two, two, read_one, two, one]


def test_a_prompt_whose_responses_begin_at_different_times_is_still_read_once(
    successor, prompts, sampling, tokenizer
):
    """A later response reuses the cached prefill of its prompt.

    Two slots serve three responses to one prompt, and then one response to another prompt. The third response
    uses the prefill that was cached for the first two.
    """
    lm = successor({}, 10)
    shapes = forwards_of(lm)
    generator = StaticGenerator(lambda: lm, tokenizer=tokenizer("abcdefg"), token_budget=2 * 10)
    rollout = generator(
        prompts([3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 6], [7, 8], limits=[6, 1, 2, 1]), sampling(6)
    )
    assert responses_of(rollout) == [[6] * 6, [6], [6, 6], [8]]
    assert [shape for shape in shapes if shape[1] == 3] == [(1, 3)]
    assert len(shapes) == 2 + 6


# -- graphs ----------------------------------------------------------------------------------------


class Replays:
    """A graph recorder that needs no GPU: a replay calls the recorded function on the same tensors."""

    def __init__(self):
        self.log = []

    def warm_up(self, step):
        self.log.append("warm")
        step()

    def record(self, step):
        self.log.append("record")

        def replay():
            self.log.append("replay")
            step()

        return replay


def test_each_shape_is_warmed_up_recorded_and_replayed():
    recorder, ran = Replays(), []
    graphs = Graphs(recorder)
    for shape in "aaabab":
        graphs.run(shape, lambda shape=shape: ran.append(shape))
    assert "".join(ran) == "aaabab"
    assert recorder.log == ["warm", "record", "replay", "replay", "warm", "replay", "record", "replay"]


def test_what_cannot_be_recorded_runs_plainly_after_one_warning(caplog):
    class Refuses(Replays):
        def record(self, step):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs, ran = Graphs(Refuses()), []
    graphs.run("a", lambda: ran.append(1))
    graphs.run("a", lambda: ran.append(2))
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.search("without CUDA graphs.*operation not permitted when stream is capturing$", said)
    graphs.run("a", lambda: ran.append(3))
    assert ran == [1, 2, 3]


def test_responses_by_graphs_are_the_same(batch, sampling, texts, monkeypatch):
    """A graph requires recurring shapes, and a step that reads and writes the same tensors each time."""
    lm, greedy = model("llama"), sampling(12, top_k=1, stop_token_ids=(5, 6, 7))
    wanted = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=10_000)(batch, greedy)
    recorder = Replays()
    monkeypatch.setattr(static, "recorder_for", lambda device: recorder)
    same(StaticGenerator(lambda: lm, tokenizer=texts, token_budget=60, check_every=4)(batch, greedy), wanted)
    assert recorder.log.count("replay") > 2 * recorder.log.count("record") > 0


# -- unsupported models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "longest", "reason"),
    [
        (MistralConfig(num_key_value_heads=2, sliding_window=8, **SIZES), 18,
         "sliding window of 8 tokens is shorter than sequences of up to 18"),
        (MistralConfig(num_key_value_heads=2, sliding_window=8, max_position_embeddings=64, **SIZES), None,
         "up to 64"),
        (GPTNeoConfig(hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
                      window_size=8, intermediate_size=32, initializer_range=0.5, **PLAIN), 40,
         "one by one are off"),
        (BloomConfig(hidden_size=16, n_layer=1, n_head=2, **PLAIN), 18, "takes no position_ids"),
        (MambaConfig(hidden_size=16, num_hidden_layers=1, **PLAIN), 18, "takes no past_key_values"),
    ],
    ids=["window", "window of the config", "window of its own", "alibi", "mamba"],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused(config, longest, reason):
    torch.manual_seed(0)
    assert reason in refusal(AutoModelForCausalLM.from_config(config).eval(), longest)


def test_windows_that_hold_every_sequence_are_no_hindrance(batch, sampling, texts):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(
        MistralConfig(num_key_value_heads=2, sliding_window=18, **SIZES)
    ).eval()
    assert refusal(lm, longest=18) is None
    check_logprobs(
        lm, StaticGenerator(lambda: lm, tokenizer=texts, token_budget=60)(batch, sampling(12)), 1.0
    )


def test_an_encoder_decoder_is_refused():
    lm = T5ForConditionalGeneration(
        T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).eval()
    assert refusal(lm, 18) == "the model is an encoder-decoder"


def test_a_model_that_ignores_the_cache_is_refused():
    lm = model("llama")
    forward = lm.forward
    lm.forward = (lambda input_ids=None, position_ids=None, attention_mask=None, past_key_values=None, **more:
                  forward(input_ids=input_ids, position_ids=position_ids, **more | dict(use_cache=False))
    )  # fmt: skip
    assert refusal(lm, 18) == "0 of 2 layers use the cache that is passed to forward()"


def test_the_cache_can_be_longer_than_a_row_of_its_columns(batch, sampling, texts):
    """The cache grows by more than one block of columns, so its views grow during decoding."""
    lm = model("llama")
    long = replace(batch, limits=torch.full((7,), 150))
    torch.manual_seed(4)
    rollout = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=10_000)(
        long, sampling(150, stop_token_ids=(5,))
    )
    check_logprobs(lm, rollout, 1.0)


def test_the_cache_is_gone_when_decoding_ends(batch, sampling, texts):
    """Training needs the memory immediately, not only after the next garbage collection."""
    gc.collect()
    gc.disable()
    try:
        StaticGenerator(lambda: model("llama"), tokenizer=texts, token_budget=10_000)(batch, sampling(4))
        assert not [x for x in gc.get_objects() if type(x) is SlotCache]
    finally:
        gc.enable()


def test_a_response_of_nan_is_made_of_tokens_and_says_nan(batch, sampling, texts):
    """Decoding reports NaN log-probs; the update then handles them on all ranks at once."""
    lm = model("llama")
    with torch.no_grad():
        lm.lm_head.weight[5] = torch.nan
    rollout = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=10_000)(batch, sampling(4))
    assert rollout.logprobs[rollout.response_mask].isnan().all() and rollout.response_mask.any(dim=1).all()
    assert (rollout.ids >= 0).all() and (rollout.ids < lm.config.vocab_size).all()


def test_columns_of_graphs_grow_by_a_quarter():
    ladder = sorted({continuous_batch.graph_columns(used) for used in range(1, 10_000)})
    assert ladder[:7] == [256, 320, 448, 576, 768, 960, 1216]
    for smaller, larger in itertools.pairwise(ladder):
        assert larger % 64 == 0 and smaller * 5 / 4 <= larger < smaller * 5 / 4 + 64
        assert continuous_batch.graph_columns(smaller) == smaller
        assert continuous_batch.graph_columns(smaller + 1) == larger
    excess = [larger / (smaller + 1) - 1 for smaller, larger in itertools.pairwise(ladder)]
    assert max(excess) == 448 / 321 - 1 < 0.4 and max(excess[2:]) < 1 / 3
    assert len([columns for columns in ladder if columns < 8192]) == 15  # the 16th holds 8,192 columns


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_responses_with_packed_weights_are_the_same(batch, sampling, texts, monkeypatch):
    """Weights are packed for responses of up to 40 tokens, and not for shorter ones or in lockstep."""
    lm = model("qwen2")
    install_linears(lm)
    monkeypatch.setattr(matmul, "_library", "torch")
    long = replace(batch, limits=torch.full((7,), 40))
    wanted = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=60)(long, sampling(40, top_k=1))
    monkeypatch.setattr(matmul, "_library", "onednn")
    spy = mock.Mock(wraps=matmul.packed_linear)
    monkeypatch.setattr(matmul, "packed_linear", spy)
    for limit, lockstep_max, packed in ((40, None, True), (8, None, False), (40, int, False)):
        spy.reset_mock()
        generator = StaticGenerator(lambda: lm, tokenizer=texts, token_budget=60, lockstep_max=lockstep_max)
        found = generator(long, sampling(limit, top_k=1))
        assert spy.called == packed
        if limit == 40:
            same(found, wanted)
            check_logprobs(lm, found, 1.0)
