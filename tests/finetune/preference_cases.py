"""Provides tiny models, and preference rows whose better answer is recognizable by its letters."""

import json
import random
from types import SimpleNamespace

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
)

from ppo_ds.config.sections.finetune import RewardModelConfig
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.data.preferences import PreferenceSource
from ppo_ds.finetune.pair_scores import pair_plan
from ppo_ds.finetune.reward_model import RewardModelTrainer
from ppo_ds.models.value import load_scorer
from tests.data.conftest import options_of
from tests.support.models import SIZES

SMALL = dict(vocab_size=260, **SIZES, initializer_range=0.2)
LLAMA = LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=96)
GPT2 = GPT2Config(vocab_size=260, n_embd=16, n_layer=2, n_head=2, n_positions=96, initializer_range=0.2)
ENCODERS = {
    "bert": BertConfig(**SMALL, max_position_embeddings=96),
    "roberta": RobertaConfig(**SMALL, max_position_embeddings=98, pad_token_id=1),
    "deberta": DebertaV2Config(
        **SMALL, max_position_embeddings=96, relative_attention=True, position_buckets=8,
        pos_att_type=["p2c", "c2p"], type_vocab_size=2,
    ),
}  # fmt: skip


def rows(count, seed=0, **more):
    """Returns rows whose preferred answers consist of x, y and z, and rejected ones of u, v and w."""
    drawn = random.Random(seed)

    def word(letters):
        return "".join(drawn.choice(letters) for _ in range(drawn.randint(1, 6)))

    return [
        {"prompt": word("abcdef"), "chosen": word("xyz"), "rejected": word("uvw"), **more}
        for _ in range(count)
    ]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def save_lm(folder, config, tokenizer):
    """Writes a language model, or a masked one, and its tokenizer."""
    torch.manual_seed(0)
    auto_class = AutoModelForCausalLM if config.model_type in ("llama", "gpt2") else AutoModelForMaskedLM
    auto_class.from_config(config).save_pretrained(folder)
    tokenizer.save(folder)
    return str(folder)


def scorer_of(folder, **options):
    section = ModelConfig(path=str(folder), dtype="fp32")
    return load_scorer(section, **{"head_init": "normal", "seed": 0} | options)


def source_of(path, tokenizer, **options):
    return PreferenceSource(path, **options_of(tokenizer=tokenizer, **options))


def losses(scorer, pairs, *, ranks=1, budget=10_000, packed=False, **settings):
    """Returns the loss of the stage over all ranks and micro-batches of one optimizer step.

    Ranks are simulated one after the other.
    """
    scorer.packed, total = packed, 0.0
    full = pairs.filled(ranks)
    for rank in range(ranks):
        world = SimpleNamespace(rank=rank, size=ranks)
        stage = SimpleNamespace(
            scorer=scorer, config=RewardModelConfig(**settings), context=SimpleNamespace(world=world)
        )
        for part in pair_plan(full, budget, world, packed):
            loss, _ = RewardModelTrainer.loss(stage, full.select(part).trimmed(), len(pairs))
            total = total + loss / ranks  # DeepSpeed averages gradients over ranks
    return total


def gradients(scorer, loss):
    scorer.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
