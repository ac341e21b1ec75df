"""Makes the inputs of the runs of this folder: tiny models, prompts of different lengths, and a reward.

The weights have a realistic scale.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForSequenceClassification

from ppo_ds.models import tiny
from ppo_ds.types import Row

CHARACTERS = "abcdefghijklmnop"
# The end token, "a" and "b". With three stop tokens of 19 tokens, answers of one token and answers that never
# end are both common.
STOPS = [1, 3, 4]
PROMPTS = [
    "a",
    "abcdefghijklmnopabcdefgh",
    "bad",
    "feed",
    "cab",
    "kidnap",
    "ho",
    "jailbaiking",
    "longpalmopal",
    "pop",
    "mad",
    "hidegamble",
]


def score(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    """Rewards the letters "e" and "i", and answers that are as long as the prompt."""
    return [
        0.5 * sum(map(r.count, "ei")) - 0.1 * abs(len(p) - len(r))
        for p, r in zip(prompts, responses, strict=True)
    ]


@torch.no_grad()
def _scatter(model: nn.Module, std: float) -> None:
    """Moves weights far from their tiny initial values.

    Attention is then not uniform, logits differ, and norms are not all 1.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, std)
        elif "norm" in name:
            parameter.normal_(1, 0.2)


def _language_model(folder: Path, tied: bool = False) -> None:
    tokenizer = tiny.character_tokenizer(CHARACTERS)
    model = tiny.tiny_llama(tokenizer, hidden_size=32, layers=2, heads=4, max_tokens=64)
    _scatter(model, 0.15)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    else:
        model.lm_head.weight.data.normal_(0, 0.3)
    tiny.save(model, tokenizer, folder)


def _score_model(folder: Path, language_model: Path) -> None:
    tokenizer = tiny.character_tokenizer(CHARACTERS)
    model = LlamaForSequenceClassification.from_pretrained(language_model, num_labels=1)
    _scatter(model, 0.15)
    model.save_pretrained(folder)
    tokenizer.save(folder)


def make(root: Path) -> None:
    """Writes ``root``/{actor,tied,other,scorer} and ``root``/{prompts,same}.jsonl; their bits never vary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _language_model(root / "actor")
        _language_model(root / "tied", tied=True)
        _language_model(root / "other")
        _score_model(root / "scorer", root / "actor")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (root / "same.jsonl").write_text(8 * (json.dumps({"prompt": "feed"}) + "\n"))
