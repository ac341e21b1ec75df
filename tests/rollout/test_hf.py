"""Tests decoding with transformers: the sampled tokens, their log-probs, and where rows end."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import HFGenerator, LogprobRecorder, generate
from tests.rollout.test_backends import responses_of

V = 40
MODELS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=V, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5, bos_token_id=None,
        eos_token_id=None,
    ),
    "llama": lambda: LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        initializer_range=0.5,
        bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("family", MODELS)
LENGTHS = [1, 6, 3, 6, 2, 4]
PAD, EOS = 0, 1


def model(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[family]()).eval()


@pytest.fixture
def batch(prompts):
    torch.manual_seed(1)
    return prompts(*[torch.randint(2, V, (n,)).tolist() for n in LENGTHS])


def decoded(lm, batch, n, **changes):
    neutral = SamplingParams(n, 0, 1.0, 1.0, 0, stop_token_ids=(), stop_strings=())
    limits = torch.full((len(batch),), n)
    return generate(
        lm, batch.ids, batch.mask, limits, replace(neutral, **changes), tokenizer=SimpleNamespace(pad_id=PAD)
    )


def log_softmax(lm, batch, responses, temperature=1.0):
    """Returns float64 log-probs [B,n,V], from one plain forward of each row without padding."""
    tables = []
    for i, response in enumerate(responses):
        row = torch.cat([batch.ids[i][batch.mask[i]], response])
        with torch.no_grad():
            logits = lm(input_ids=row[None]).logits[0].double()
        tables.append(torch.log_softmax(logits / temperature, -1)[-len(response) - 1 : -1])
    return torch.stack(tables)


# -- log-probs -------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    "knobs",
    [
        dict(),
        dict(top_k=1),
        dict(temperature=0.7),
        dict(temperature=0.7, top_k=5),
        dict(top_p=0.5),
        dict(temperature=1.3, top_p=0.8, top_k=7),
    ],
    ids=lambda knobs: "_".join(f"{k}{v}" for k, v in knobs.items()) or "neutral",
)
def test_logprobs_are_those_of_the_whole_distribution_at_the_temperature(batch, family, knobs):
    lm = model(family)
    torch.manual_seed(2)
    responses, logprobs = decoded(lm, batch, 7, **knobs)
    assert responses.shape == logprobs.shape == (6, 7) and logprobs.dtype == torch.float32
    table = log_softmax(lm, batch, responses, knobs.get("temperature", 1.0))
    expected = table.gather(2, responses[..., None])[..., 0]
    assert (logprobs - expected).abs().max() < 1e-5
    if top_k := knobs.get("top_k"):
        # the token is one of the top_k most likely
        assert ((table > expected[..., None] + 1e-9).sum(-1) < top_k).all()
    if (top_p := knobs.get("top_p")) and not top_k:
        likelier = torch.where(table > expected[..., None], table.exp(), 0.0).sum(-1)
        assert (likelier < top_p).all()


def test_logprobs_are_float32_of_a_bf16_model(batch):
    lm = model("llama").bfloat16()
    torch.manual_seed(4)
    responses, logprobs = decoded(lm, batch, 3)
    assert (
        logprobs.dtype == torch.float32
        and (logprobs - log_softmax(lm, batch, responses).gather(2, responses[..., None])[..., 0]).abs().max()
        < 0.2
    )


def test_a_step_that_was_undone_leaves_no_logprob():
    """transformers may stop one step late, so three steps are recorded for two tokens."""
    recorder = LogprobRecorder(1.0)
    steps = torch.tensor([[[0.0, 1.0, 2.0]], [[2.0, 0.0, 0.0]], [[9.0, 0.0, 0.0]]])
    for ids, scores in zip(([[9]], [[9, 1]], [[9, 1, 2]]), steps, strict=True):
        recorder(torch.tensor(ids), scores)
    expected = torch.log_softmax(steps[:2, 0], -1)[[0, 1], [1, 2]]
    torch.testing.assert_close(recorder.stacked(torch.tensor([[1, 2]])), expected[None])


# -- tokens ----------------------------------------------------------------------------------------


def test_greedy_draws_nothing_where_two_tokens_tie(chain, prompts):
    """bf16 logits tie often, and sampling among tied tokens would make ranks and runs differ."""
    table = torch.zeros(8, 8)
    table[:, [4, 6]] = 5.0
    responses, _ = decoded(chain(table), prompts(*[[3]] * 50), 2, top_k=1)
    assert responses.unique().tolist() == [4]


def chi_square(draws, probabilities):
    counts = torch.bincount(draws, minlength=len(probabilities)).double()
    expected = probabilities * counts.sum()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    ("knobs", "kept"),
    [
        (dict(), 8),
        (dict(temperature=0.7), 8),
        (dict(temperature=2.0), 8),
        (dict(top_k=3), 3),
        (dict(top_p=0.6), 2),
    ],
)
def test_draws_follow_the_distribution(chain, prompts, knobs, kept):
    """3,000 first tokens follow softmax(logits / T), renormalised over the tokens kept by top_k and top_p.

    The seed is fixed. The 99.9% quantile of chi-square with 7 degrees of freedom is 24.3, and sampling at
    another temperature gives more than 100.
    """
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    lm = chain(logits.repeat(8, 1))
    torch.manual_seed(5)
    batch = prompts(*[[3]] * 3000)
    responses, logprobs = decoded(lm, batch, 1, **knobs)
    whole = torch.softmax(logits.double() / knobs.get("temperature", 1.0), 0)
    narrowed = torch.where(torch.arange(8) < kept, whole, 0.0)
    assert chi_square(responses[:, 0], narrowed / narrowed.sum()) < 24.3
    assert (logprobs[:, 0].double().exp() - whole[responses[:, 0]]).abs().max() < 1e-5
    assert chi_square(responses[:, 0], torch.softmax(logits.double() / 5, 0)) > 100


# -- stop ids --------------------------------------------------------------------------------------


@pytest.fixture
def decode_rows(tokenizer, prompts, sampling):
    """Decodes prompts with HFGenerator; characters are tokens 3, 4, ..."""

    def run(lm, rows, n, texts="abcdefg", token_budget=10_000, **knobs):
        generator = HFGenerator(lambda: lm, tokenizer=tokenizer(texts), token_budget=token_budget)
        return generator(prompts(*rows), sampling(n, **knobs))

    return run


def test_a_models_own_end_token_does_not_stop_where_none_is_asked_for(successor, decode_rows):
    lm = successor({3: EOS, EOS: 4}, 10)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = None
    lm.config.eos_token_id = EOS
    assert responses_of(decode_rows(lm, [[3]], 4)) == [[EOS, 4, 4, 4]]


def test_min_new_tokens_keeps_stop_ids_away(chain, decode_rows):
    """Masking the end token does not change the log-probs, which are of the unmasked distribution.

    After tokens 3 and 4, the end token is far more likely than token 4.
    """
    table = torch.full((10, 10), -20.0)
    table[3:5, EOS], table[3:5, 4] = 3.0, 0.0
    for minimum in (1, 2, 3):
        rollout = decode_rows(
            chain(table), [[3], [3, 3]], 5, stop_token_ids=(EOS, 8), min_new_tokens=minimum, top_k=1
        )
        assert responses_of(rollout) == [[4] * minimum + [EOS]] * 2
        assert rollout.logprobs[0].tolist() == pytest.approx(
            [-3.0486] * minimum + [-0.0486], abs=1e-4
        )  # -log(1 + e^3), and 3 more for the end token
    assert responses_of(decode_rows(chain(table), [[3]], 5, stop_token_ids=(EOS, 8), top_k=1)) == [[EOS]]


# -- stop strings ----------------------------------------------------------------------------------


def test_decoding_ends_with_the_last_stop_string(successor, decode_rows):
    lm = successor({3: 4, 4: 5, 5: 6}, 10)
    steps = []
    lm.lm_head.register_forward_hook(lambda *_: steps.append(1))
    assert responses_of(decode_rows(lm, [[3], [4]], 50, stop_strings=("c",))) == [[4, 5], [5]]
    assert len(steps) == 2


def test_long_stop_strings_end_decoding_too(chain, prompts, sampling):
    """A stop string of twenty three-byte characters, one byte per token, ends decoding after 60 tokens."""
    text, steps = "\N{SNOWMAN}" * 20, []

    class Bytes:
        pad_id = 0
        decode = staticmethod(
            lambda ids, skip_special_tokens: bytes(i + 120 for i in ids).decode(errors="replace")
        )

    first, second, third = (byte - 120 for byte in text[0].encode())
    table = torch.zeros(120, 120)
    table[first, second] = table[second, third] = table[third, first] = 50.0
    lm = chain(table)
    lm.lm_head.register_forward_hook(lambda *_: steps.append(1))
    rollout = HFGenerator(lambda: lm, tokenizer=Bytes, token_budget=10_000)(
        prompts([third]), sampling(100, stop_strings=(text,))
    )
    assert rollout.response_mask.sum() == len(steps) == 60 and rollout.finished.all()


# -- limits of single rows -------------------------------------------------------------------------


def test_a_limit_wins_over_the_least_number_of_tokens(successor, prompts, sampling, tokenizer):
    generator = HFGenerator(
        lambda: successor({3: EOS}, 10), tokenizer=tokenizer("abcdefg"), token_budget=10_000
    )
    rollout = generator(
        prompts([3], [3], limits=[2, 9]), sampling(9, min_new_tokens=4, stop_token_ids=(EOS,))
    )
    assert (
        rollout.response_mask.sum(1)[0] == 2
        and rollout.response_mask.sum(1)[1] > 4
        and not rollout.finished[0]
    )


def test_rows_are_grouped_by_what_they_may_cost(batch, sampling, tokenizer):
    """A group costs its rows times the sum of its longest prompt and its longest limit.

    The budget is 14 and the prompts have 1, 6, 3, 6, 2 and 4 tokens.
    """
    lm, shapes = model("llama"), []
    decode = lm.generate
    lm.generate = lambda input_ids, **more: (
        shapes.append((*input_ids.shape, more["generation_config"].max_new_tokens))
        or decode(input_ids=input_ids, **more)
    )
    generator = HFGenerator(
        lambda: lm, tokenizer=tokenizer([chr(97 + i) for i in range(V - 3)]), token_budget=14
    )
    generator(replace(batch, limits=torch.tensor([1, 8, 2, 1, 1, 1])), sampling(8))
    # the totals are 2, 14, 5, 7, 3, 5. Row 1 is a separate group. Rows 3 and 2 would cost 2 x (6 + 2) = 16,
    # so row 3 is a group too; rows 2 and 5 cost 2 x (4 + 2) = 12; rows 4 and 0 remain
    assert shapes == [(1, 6, 8), (1, 6, 1), (2, 4, 2), (2, 2, 1)]


# -- chunks ----------------------------------------------------------------------------------------


def test_the_model_is_asked_for_at_each_call(chain, prompts, sampling, tokenizer):
    """With ZeRO-3 the weights for decoding exist only inside generation mode."""
    asked = []

    def lm():
        asked.append(1)
        return chain(torch.zeros(8, 8))

    generator = HFGenerator(lm, tokenizer=tokenizer("abcde"), token_budget=1)
    assert not asked
    generator(prompts([3], [4]), sampling(1))
    generator(prompts([3]), sampling(1))
    assert len(asked) == 2
