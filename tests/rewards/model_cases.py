"""Builds tiny reward models with the services of one CPU process, and reference scores by transformers."""

import torch
from transformers import AutoModelForSequenceClassification, DebertaV2Config, GPT2Config, LlamaConfig

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.rewards.model import model_reward
from tests.rewards.reward_cases import VOCAB, Placed, loaded, save_tokenizer
from tests.support.models import SIZES

TINY = dict(vocab_size=VOCAB, **SIZES, initializer_range=0.5, num_labels=1)
LLAMA = LlamaConfig(**TINY)
GPT2 = GPT2Config(
    vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=48, initializer_range=0.5, num_labels=1
)
DEBERTA = DebertaV2Config(
    **TINY,
    max_position_embeddings=64,
    relative_attention=True,
    position_buckets=8,
    pos_att_type=["p2c", "c2p"],
    type_vocab_size=2,
)


def save_model(folder, config, auto_class=AutoModelForSequenceClassification, **tokenizer):
    torch.manual_seed(0)
    auto_class.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder, **tokenizer)


class Build:
    """Builds model_reward in one CPU process; ``placed`` is the scorer, ``notes`` the banner's lines."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(
        self,
        path,
        *,
        ranks=lambda n: n,
        score_tokens=10_000,
        audit="off",
        dtype="fp32",
        broken=lambda module: module,
        **settings,
    ):
        """Builds the reward; ``broken`` replaces the loaded module."""

        def load_frozen(load, model, zero, key):
            self.zero, self.dtype = zero, model.dtype
            module = broken(loaded(load, model, key))
            self.placed = Placed(module)
            return module, self.placed

        self.notes = []
        services = dict(
            tokenizer=self.tokenizer,
            load_frozen=load_frozen,
            all_reduce_max=ranks,
            score_tokens=score_tokens,
            note=self.notes.append,
        )
        return model_reward(ModelConfig(path=path, dtype=dtype), **settings, audit=audit, **services)


def by_hand(path, ids, **inputs):
    """Scores one unpadded text with only transformers, at its last position."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([ids]), **{k: torch.tensor([v]) for k, v in inputs.items()}
        ).logits[0, 0]
