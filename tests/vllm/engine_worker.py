"""Decodes with the real engine, for test_engine.py. Argument: a folder with a model and its tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo_ds.distributed.world import connect
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.static import StaticGenerator
from ppo_ds.rollout.vllm import VLLMGenerator
from ppo_ds.types import Prompts, Rollout

DRAWS = 4000


def sampling(max_new_tokens: int, **changes: float | int) -> SamplingParams:
    neutral = dict(
        min_new_tokens=0, temperature=1.0, top_p=1.0, top_k=0, stop_token_ids=(1,), stop_strings=()
    )
    return SamplingParams(max_new_tokens, **neutral | changes)


def batch(rows: list[list[int]]) -> Prompts:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return Prompts(ids, mask, torch.full((len(rows),), 10**6), tuple({} for _ in rows))


def check_greedy(engine: VLLMGenerator, static: StaticGenerator, tokenizer_size: int) -> None:
    """The tokens of greedy responses to 64 prompts of different lengths are those of ``static``."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(3, tokenizer_size, (1 + number % 20,), generator=draw).tolist() for number in range(64)
    ]
    ours, theirs = (each(batch(rows), sampling(16, top_k=1)) for each in (static, engine))
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.response_mask, theirs.response_mask)
    assert torch.equal(ours.finished, theirs.finished)
    assert len({tuple(row) for row in theirs.ids.tolist()}) > 32
    torch.testing.assert_close(theirs.logprobs, ours.logprobs, atol=1e-5, rtol=0)


def check_distribution(engine: VLLMGenerator, logits: Tensor, row: list[int], **how: float | int) -> None:
    """The shares of 4,000 drawn tokens are within 5 standard errors of their probabilities."""
    probabilities = logits.double().softmax(-1)
    if "top_k" in how:
        kept = probabilities >= probabilities.topk(int(how["top_k"])).values[-1]
        probabilities = probabilities.where(kept, 0.0) / probabilities[kept].sum()
    rollout: Rollout = engine(batch([row] * DRAWS), sampling(1, **how))
    shares = torch.bincount(rollout.ids[:, -1], minlength=len(logits)) / DRAWS
    errors = (probabilities * (1 - probabilities) / DRAWS).sqrt()
    assert ((shares - probabilities).abs() <= 5 * errors + 1e-12).all(), (shares, probabilities)
    assert (shares > 0.02).sum() >= 3, shares


def main() -> None:
    world, folder = connect(timeout_minutes=10), Path(sys.argv[1])
    tokenizer = load_tokenizer(str(folder))
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(world.device).eval()
    common = dict(lm=lambda: lm, tokenizer=tokenizer, token_budget=4000)
    engine = VLLMGenerator(**common, settings=VLLMConfig(), kv_cache=2**26, longest=64, temperature=1.0)
    with engine.loaded(iter(lm.named_parameters())):
        check_greedy(engine, StaticGenerator(**common), tokenizer.vocab_size)
        row = [4, 5, 13, 6]
        with torch.no_grad():
            logits = lm(torch.tensor([row])).logits[0, -1]
        torch.manual_seed(1)
        check_distribution(engine, logits, row)
        check_distribution(engine, logits, row, top_k=3)
    # the same engine with other weights, which a reload replaces as a whole
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    with engine.loaded(iter(lm.named_parameters())):
        check_greedy(engine, StaticGenerator(**common), tokenizer.vocab_size)
