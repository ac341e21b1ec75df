"""Tests decoding with transformers: the sampled tokens, their log-probs, and where rows end."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import HFGenerator, LogprobRecorder, generate

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


@EVERY
def test_logprobs_of_rows_that_end_early(batch, family):
    """A stop id ends only its row, and the log-probs of the other rows remain correct."""
    lm = model(family)
    torch.manual_seed(3)
    stops = (5, 6, 7, 8, 9, 10)
    lengths = set()
    # sampled tokens depend on the processor, but eight samples end at three or more different positions
    for _ in range(8):
        responses, logprobs = decoded(lm, batch, 9, stop_token_ids=stops)
        for i, response in enumerate(responses.tolist()):
            n = next((t + 1 for t, token in enumerate(response) if token in stops), len(response))
            table = log_softmax(lm, batch.select(torch.tensor([i])), responses[i : i + 1, :n])
            assert (
                logprobs[i, :n] - table.gather(2, responses[i : i + 1, :n, None])[0, :, 0]
            ).abs().max() < 1e-5
            lengths.add(n)
    assert len(lengths) > 2


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


@EVERY
def test_greedy_tokens_are_those_of_a_loop_by_hand(batch, family):
    lm = model(family)
    responses, _ = decoded(lm, batch, 6, top_k=1, temperature=0.3)
    for i in range(len(batch)):
        row = batch.ids[i][batch.mask[i]]
        for _ in range(6):
            with torch.no_grad():
                row = torch.cat([row, lm(input_ids=row[None]).logits[0, -1].argmax()[None]])
        assert responses[i].tolist() == row[-6:].tolist()
        by_hand = lm.generate(
            batch.ids[i][batch.mask[i]][None],
            attention_mask=torch.ones(1, LENGTHS[i]),
            do_sample=False,
            max_new_tokens=6,
        )
        assert responses[i].tolist() == by_hand[0, -6:].tolist()


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


def test_two_seeds_draw_differently_and_one_alike(batch):
    lm = model("llama")
    draws = []
    for seed in (6, 6, 7):
        torch.manual_seed(seed)
        draws.append(decoded(lm, batch, 5)[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# -- stop ids --------------------------------------------------------------------------------------


@pytest.fixture
def decode_rows(tokenizer, prompts, sampling):
    """Decodes prompts with HFGenerator; characters are tokens 3, 4, ..."""

    def run(lm, rows, n, texts="abcdefg", token_budget=10_000, **knobs):
        generator = HFGenerator(lambda: lm, tokenizer=tokenizer(texts), token_budget=token_budget)
        return generator(prompts(*rows), sampling(n, **knobs))

    return run


def responses_of(rollout):
    return [
        ids[mask].tolist()
        for ids, mask in zip(rollout.ids[:, rollout.prompt_width :], rollout.response_mask, strict=True)
    ]


def test_every_stop_id_ends_a_row_and_an_empty_list_none(successor, decode_rows):
    lm = successor({3: 4, 4: EOS, EOS: EOS, 5: 6, 6: 7, 7: 3}, 10)
    rows = [[3], [5], [9]]
    rollout = decode_rows(lm, rows, 5, stop_token_ids=(EOS, 7))
    assert responses_of(rollout) == [[4, EOS], [6, 7], [9] * 5] and rollout.finished.tolist() == [
        True,
        True,
        False,
    ]
    never = decode_rows(lm, rows, 5)
    assert (
        responses_of(never) == [[4, EOS, EOS, EOS, EOS], [6, 7, 3, 4, EOS], [9] * 5]
        and not never.finished.any()
    )


def test_decoding_ends_when_every_row_has_met_some_stop_id(successor, decode_rows):
    lm, steps = successor({3: EOS, 4: 7, 5: 4}, 10), []
    lm.lm_head.register_forward_hook(lambda *_: steps.append(1))
    assert (
        responses_of(decode_rows(lm, [[3], [4], [5]], 50, stop_token_ids=(EOS, 7))) == [[EOS], [7], [4, 7]]
        and len(steps) == 2
    )


def test_a_models_own_end_token_does_not_stop_where_none_is_asked_for(successor, decode_rows):
    lm = successor({3: EOS, EOS: 4}, 10)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = None
    lm.config.eos_token_id = EOS
    assert responses_of(decode_rows(lm, [[3]], 4)) == [[EOS, 4, 4, 4]]


def test_one_token_responses(successor, decode_rows):
    rollout = decode_rows(successor({3: EOS, 4: EOS}, 10), [[3, 4], [4, 3], [3]], 6, stop_token_ids=(EOS,))
    assert responses_of(rollout) == [[EOS]] * 3 and rollout.response_width == 1 and rollout.finished.all()
    assert rollout.logprobs.abs().max() < 1e-5


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


def test_pad_is_eos(successor, prompts, sampling, tokenizer):
    same = tokenizer("abcdefg")
    same.pad_id = EOS
    generator = HFGenerator(lambda: successor({3: 4, 4: EOS}, 10), tokenizer=same, token_budget=10_000)
    rollout = generator(prompts([EOS, 3], [9], [4], pad=EOS), sampling(4, stop_token_ids=(EOS,)))
    assert responses_of(rollout) == [[4, EOS], [9] * 4, [EOS]] and rollout.finished.tolist() == [
        True,
        False,
        True,
    ]
    assert rollout.prompt_lengths.tolist() == [2, 1, 1]


# -- stop strings ----------------------------------------------------------------------------------


def test_stop_strings_across_tokens(successor, decode_rows):
    """The tokens are a b c d ...: "cd" is complete with the token d; other rows continue to their end."""
    lm = successor({3: 4, 4: 5, 5: 6, 6: 7, 8: 9, 9: EOS}, 10)
    rollout = decode_rows(lm, [[3], [8], [5]], 7, stop_token_ids=(EOS,), stop_strings=("cd",))
    assert responses_of(rollout) == [[4, 5, 6], [9, EOS], [6, 7, 7, 7, 7, 7, 7]]
    assert rollout.finished.tolist() == [True, True, False]


def test_stop_strings_inside_a_token(successor, decode_rows):
    """Token 5, "xaby", ends the response although text follows the stop string inside the token."""
    lm = successor({3: 4, 4: 5, 5: 6}, 8)
    rollout = decode_rows(lm, [[3]], 5, texts=["a", "b", "xaby", "z", "w"], stop_strings=("ab",))
    assert responses_of(rollout) == [[4, 5]] and rollout.finished.tolist() == [True]


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


def test_a_stop_string_begins_in_the_response_not_in_the_prompt(successor, decode_rows):
    """A stop string must lie within the response.

    The prompt ends with "b" and the response starts with "c", so "bc" is not a stop.
    """
    rollout = decode_rows(successor({3: 4, 4: 5, 5: 6, 6: 7}, 10), [[3, 4]], 4, stop_strings=("bc",))
    assert responses_of(rollout) == [[5, 6, 7, 7]] and rollout.finished.tolist() == [False]
    assert rollout.logprobs.abs().max() < 1e-5


def test_special_tokens_can_be_stop_strings(successor, decode_rows):
    rollout = decode_rows(successor({3: 4, 4: EOS, EOS: 5}, 10), [[3], [4]], 6, stop_strings=("<eos>",))
    assert responses_of(rollout) == [[4, EOS], [EOS]] and rollout.finished.all()


# -- limits of single rows -------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("token_budget", [1, 24, 10_000])
def test_a_greedy_response_with_a_limit_is_the_start_of_that_without(
    batch, family, sampling, tokenizer, token_budget
):
    lm, texts = model(family), tokenizer([chr(97 + i) for i in range(V - 3)])
    greedy, limits = sampling(6, stop_token_ids=(5, 6, 7, 8, 9, 10, 11)).as_greedy(), [1, 6, 3, 2, 50, 4]
    generator = HFGenerator(lambda: lm, tokenizer=texts, token_budget=token_budget)
    whole, cut = generator(batch, greedy), generator(replace(batch, limits=torch.tensor(limits)), greedy)
    free, ends = responses_of(whole), [len(response) for response in responses_of(whole)]
    assert responses_of(cut) == [response[:n] for response, n in zip(free, limits, strict=True)]
    assert cut.finished.tolist() == [
        done and n <= limit for done, n, limit in zip(whole.finished.tolist(), ends, limits, strict=True)
    ]
    assert cut.limits.tolist() == [1, 6, 3, 2, 6, 4] and whole.limits.tolist() == [6] * 6
    width = cut.response_width
    torch.testing.assert_close(
        cut.logprobs[cut.response_mask], whole.logprobs[:, :width][cut.response_mask], rtol=0, atol=1e-5
    )
    assert not cut.logprobs[~cut.response_mask].any()


def test_drawn_responses_with_limits_have_their_logprobs(batch, sampling, tokenizer):
    lm, limits = model("llama"), [1, 6, 3, 2, 5, 4]
    generator = HFGenerator(
        lambda: lm, tokenizer=tokenizer([chr(97 + i) for i in range(V - 3)]), token_budget=10_000
    )
    torch.manual_seed(8)
    rollout = generator(replace(batch, limits=torch.tensor(limits)), sampling(6, temperature=0.8))
    assert rollout.response_mask.sum(1).tolist() == limits and not rollout.finished.any()
    for i, n in enumerate(limits):
        response = rollout.ids[i : i + 1, rollout.prompt_width :][:, :n]
        table = log_softmax(lm, batch.select(torch.tensor([i])), response, 0.8)
        assert (rollout.logprobs[i, :n] - table.gather(2, response[..., None])[0, :, 0]).abs().max() < 1e-5


def test_decoding_ends_with_the_last_row_that_may_go_on(successor, prompts, sampling, tokenizer):
    """Decoding takes as many steps as the longest unfinished row needs.

    The limits are 3, 1 and 9, and the last row stops after two tokens, so decoding takes three steps. In
    chunks of one row it takes 2, 3 and 1 steps.
    """
    lm, steps = successor({5: 6, 6: EOS}, 10), []
    lm.lm_head.register_forward_hook(lambda *_: steps.append(1))
    rows = prompts([3], [4], [5], limits=[3, 1, 9])
    for token_budget, expected in ((10_000, 3), (1, 6)):
        steps.clear()
        rollout = HFGenerator(lambda: lm, tokenizer=tokenizer("abcdefg"), token_budget=token_budget)(
            rows, sampling(50, stop_token_ids=(EOS,))
        )
        assert responses_of(rollout) == [[3, 3, 3], [4], [6, EOS]] and rollout.finished.tolist() == [
            False,
            False,
            True,
        ]
        assert len(steps) == expected


def test_a_stop_that_is_whole_at_the_limit(successor, prompts, sampling, tokenizer):
    """A stop that is complete exactly at the limit of its row makes the row finished.

    The tokens are a b c d ...: "cd" is complete with the third new token. In the last row, the second new
    token is the end token.
    """
    generator = HFGenerator(
        lambda: successor({3: 4, 4: 5, 5: 6, 8: 9, 9: EOS}, 10),
        tokenizer=tokenizer("abcdefg"),
        token_budget=10_000,
    )
    rollout = generator(
        prompts([3], [3], [8], [8], limits=[3, 2, 2, 1]),
        sampling(8, stop_token_ids=(EOS,), stop_strings=("cd",)),
    )
    assert responses_of(rollout) == [[4, 5, 6], [4, 5], [9, EOS], [9]] and rollout.finished.tolist() == [
        True,
        False,
        True,
        False,
    ]


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


@EVERY
@pytest.mark.parametrize("token_budget", [1, 17, 24, 40])
def test_chunks_change_no_greedy_response(batch, family, token_budget, sampling, tokenizer):
    lm, texts = model(family), tokenizer([chr(97 + i) for i in range(V - 3)])
    greedy = sampling(6, top_k=1, stop_token_ids=(5, 6, 7, 8))
    whole = HFGenerator(lambda: lm, tokenizer=texts, token_budget=10_000)(batch, greedy)
    shapes, decode = [], lm.generate
    lm.generate = lambda input_ids, **more: (
        shapes.append(tuple(input_ids.shape)) or decode(input_ids=input_ids, **more)
    )
    parts = HFGenerator(lambda: lm, tokenizer=texts, token_budget=token_budget)(batch, greedy)
    assert len(shapes) > 1 and all(rows * (width + 6) <= token_budget or rows == 1 for rows, width in shapes)
    assert (
        sum(rows for rows, _ in shapes) == len(batch) and shapes[0][1] == 6 and shapes[-1][1] < 6
    )  # each chunk is only as wide as its rows need
    for name in ("ids", "attention_mask", "response_mask", "finished"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("token_budget", [1, 20, 10_000])
def test_responses_stay_with_their_prompts(successor, prompts, sampling, tokenizer, token_budget):
    """The longest prompts are decoded first, but rows and their metadata return in the original order."""
    lm = successor({token: token + 10 for token in range(10)}, 24)
    rows = [[3], [9, 9, 4], [5], [9, 6], [9, 9, 9, 9, 7], [8, 3]]
    generator = HFGenerator(
        lambda: lm, tokenizer=tokenizer("abcdefghijklmnopqrstu"), token_budget=token_budget
    )
    rollout = generator(prompts(*rows), sampling(2, top_k=1))
    assert responses_of(rollout) == [[row[-1] + 10] * 2 for row in rows]
    width = rollout.prompt_width
    assert [
        ids[:width][mask[:width]].tolist()
        for ids, mask in zip(rollout.ids, rollout.attention_mask, strict=True)
    ] == rows
    assert [row["row"] for row in rollout.metadata] == list(range(6))


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


def test_a_rollout_is_cut_to_its_longest_response_and_prompt(successor, prompts, sampling, tokenizer):
    # padded for a third row that is not selected
    batch = prompts([3], [4], [8, 8, 8, 8]).select(torch.tensor([0, 1]))
    generator = HFGenerator(
        lambda: successor({3: EOS, 4: 3}, 10), tokenizer=tokenizer("abcdefg"), token_budget=10_000
    )
    rollout = generator(batch, sampling(30, stop_token_ids=(EOS,)))
    assert (rollout.prompt_width, rollout.response_width) == (1, 2)
    assert rollout.ids.tolist() == [[3, EOS, PAD], [4, 3, EOS]] and rollout.logprobs.shape == (2, 2)
