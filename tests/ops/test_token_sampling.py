"""Tests sampling by inversion of the cumulative distribution, and the filters of transformers."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from ppo_ds.ops.token_sampling import draw, filter_logits, inverse_cdf

NEUTRAL = dict(temperature=1.0, top_k=0, top_p=1.0)


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_token_at_which_the_cumulative_sum_exceeds_the_number():
    """With weights 1, 3, 0, 4, uniforms in [0, 1/8) give token 0, in [1/8, 1/2) 1, and in [1/2, 1) 3."""
    weights = torch.tensor([[1.0, 3.0, 0.0, 4.0]]).expand(7, -1)
    found = inverse_cdf(weights, double(0.0, 0.124, 0.126, 0.499, 0.501, 0.9, 1 - 2**-53))
    assert found.tolist() == [0, 0, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("vocabulary", [128, 300, 1000])
def test_tokens_of_probability_zero_are_never_hit(vocabulary):
    """Only two tokens have weight, at the ends or across a block boundary; uniforms are in [0, 1)."""
    uniforms = torch.cat([torch.linspace(0, 1, 999, dtype=torch.float64)[:-1], double(0.0, 1 - 2**-53)])
    for pair in ((0, vocabulary - 1), (126, 127), (vocabulary // 2, vocabulary // 2 + 1)):
        weights = torch.zeros(len(uniforms), vocabulary)
        weights[:, pair[0]], weights[:, pair[1]] = 1e-6, 3e-6
        found = inverse_cdf(weights, uniforms)
        assert set(found.tolist()) == set(pair)
        assert torch.equal(found == pair[0], uniforms < 0.25)


def test_evenly_spaced_numbers_hit_each_token_in_proportion():
    """100,000 evenly spaced numbers hit each of 1,000 tokens in proportion to its weight, within one hit."""
    torch.manual_seed(0)
    weights = torch.rand(1000).pow(3)
    n = 100_000
    found = inverse_cdf(weights.expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    wanted = weights.double() / weights.double().sum() * n
    assert (torch.bincount(found, minlength=1000) - wanted).abs().max() < 1.1
    assert (found.diff() >= 0).all()


def test_logprobs_are_those_of_the_whole_distribution_at_the_temperature():
    torch.manual_seed(1)
    logits = torch.randn(50, 300) * 3
    bars = (torch.tensor([4, 5]), torch.arange(50) < 25)
    for knobs in (
        dict(),
        dict(temperature=0.6),
        dict(top_k=1),
        dict(top_k=5, temperature=2.0),
        dict(top_p=0.4),
        dict(barred=bars),
    ):
        tokens, logprobs = draw(logits.bfloat16(), torch.rand(50, dtype=torch.float64), **NEUTRAL | knobs)
        whole = torch.log_softmax(logits.bfloat16().double() / knobs.get("temperature", 1.0), -1)
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(
            logprobs.double(), whole.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5
        )


def test_greedy_takes_the_first_most_likely_token():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, 2.9]])
    for u in (0.0, 0.99):
        assert draw(logits, double(u, u), **NEUTRAL | dict(top_k=1, temperature=0.1))[0].tolist() == [1, 0]


def test_excluded_tokens_are_not_sampled_in_their_rows():
    """The most likely token is excluded only for the first row, with greedy decoding and sampling."""
    logits = torch.tensor([[9.0, 1.0, 0.0], [9.0, 1.0, 0.0]])
    for top_k in (0, 1):
        tokens, _ = draw(
            logits,
            double(0.1, 0.1),
            **NEUTRAL | dict(top_k=top_k),
            barred=(torch.tensor([0]), torch.tensor([True, False])),
        )
        assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (5, 0.7), (0, 1e-9), (1000, 0.99)])
def test_filters_keep_the_same_tokens_as_transformers(top_k, top_p):
    torch.manual_seed(2)
    scores = (torch.randn(40, 60) * 2).round(decimals=1)  # rounded, so that some are equal
    wanted = scores
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    assert torch.equal(filter_logits(scores, top_k, top_p), wanted)
